"""What torch declares of its ops, as programs are traced by it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict

import tilewright
from tilewright.capture.torch_declarations import any_kernels, vector_norm_counted
from tilewright.capture.trace import fits, trace

assert tilewright.backend  # with it, declarations are put right


@pytest.mark.parametrize("ord", [0, 1, 2, 3, float("inf")])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_over_dims_of_size_one_have_the_declared_shape(ord: float, keepdim: bool) -> None:
    """Seen with torch 2.11: a dim counted from the end stayed, so that programs were traced with other shapes."""
    for shape in ((1, 5), (5, 1), (1, 1), (3, 1, 4)):
        x = torch.randn(shape)
        for dim in (None, 0, -1, -2, [0, -1]):
            made = torch.linalg.vector_norm(x, ord, dim, keepdim)
            with FakeTensorMode() as mode:
                told = torch.linalg.vector_norm(mode.from_tensor(x), ord, dim, keepdim)
            assert (told.shape, told.stride()) == (made.shape, made.stride())


def test_dims_are_counted_from_the_start() -> None:
    asked: list[object] = []

    def usual(x: Tensor, ord: float, dim: object, keepdim: bool, *, dtype: torch.dtype | None) -> Tensor:
        asked.append(dim)
        return x

    declared = vector_norm_counted(usual)
    for dim in (-1, [-2, 0], None, 1, 7):
        declared(torch.zeros(2, 3, 4), 2.0, dim)
    assert asked == [[2], [1, 0], None, [1], [7]]


def test_whoever_asks_for_the_backend_has_them_put_right() -> None:
    """Also who gives it to `torch.compile` itself, where torch's entry point is not asked."""
    code = "import sys, tilewright; tilewright.backend; print('tilewright.capture.torch_declarations' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
WITHOUT = (
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit_no_training",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("singles", [False, True])
@pytest.mark.parametrize("name", [*NORMS, *WITHOUT])
def test_statistics_of_batch_norms_have_the_declared_type(
    name: str, dtype: torch.dtype, *, singles: bool
) -> None:
    """Seen with torch 2.13: of halves with weights in singles, they are singles; halves were declared."""
    if singles and dtype is torch.float64:
        pytest.skip("torch refuses it")
    op = getattr(torch.ops.aten, name).default
    given = [torch.randn(4, 3, 5, 5).to(dtype), *(torch.ones(3).to(torch.float32 if singles else dtype),) * 4]
    rest = (True, 0.1, 1e-5) if name in NORMS else (0.1, 1e-5)
    made = op(*[t.clone() for t in given], *rest)
    with FakeTensorMode() as mode:
        told = op(*map(mode.from_tensor, given), *rest)
    assert [t.dtype for t in told[:3]] == [t.dtype for t in made[:3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("singles", [False, True])
def test_what_norms_of_rows_and_groups_give_has_the_declared_type(
    dtype: torch.dtype, *, singles: bool
) -> None:
    x, w = torch.randn(2, 8, 5, 6).to(dtype), torch.ones(8).to(torch.float32 if singles else dtype)
    rows = lambda x, w: torch.native_layer_norm(x.transpose(1, -1), [8], w, w, 1e-5)  # noqa: E731
    groups = lambda x, w: torch.native_group_norm(x, w, w, 2, 8, 30, 4, 1e-5)  # noqa: E731

    def back(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        mask = [True, True, True]
        return torch.ops.aten.native_group_norm_backward(x, x, *groups(x, w)[1:], w, 2, 8, 30, 4, mask)

    for run in (rows, groups, back):
        made = run(x, w)
        with FakeTensorMode() as mode:
            told = run(mode.from_tensor(x), mode.from_tensor(w))
        assert [(t.dtype, t.stride()) for t in told] == [(t.dtype, t.stride()) for t in made]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_front_of_a_batch_norm_cancel_as_in_eager_mode(layout: torch.memory_format) -> None:
    """Of a bias there nothing is left but roundings, 3.7 times as many where the saved mean was a half."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    net = net.to(memory_format=layout)  # type: ignore[call-overload]
    compiled = torch.compile(net, backend="tilewright")
    errors = [0.0, 0.0]
    for _ in range(12):
        x = torch.randn(4, 3, 12, 12).to(memory_format=layout)
        for k, f in enumerate((compiled, net)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = f(x).float().square().mean()
            errors[k] += float(torch.autograd.grad(loss, net[0].bias)[0].square().sum())  # type: ignore[arg-type]
    assert errors[0] < 1.5**2 * errors[1]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_a_trace_holds_for_any_number_of_images(window: int, stride: int) -> None:
    """Of fewer than 16 torch may take other kernels: artifacts of files refused more."""
    conv = nn.Conv2d(3, 8, window, stride)
    program = trace(conv, [torch.randn(2, 3, 9, 9)], [(0,)])
    assert all(fits(program, [torch.randn(n, 3, 9, 9)]) for n in (1, 2, 15, 16, 40))
    assert not fits(program, [torch.randn(2, 4, 9, 9)])


def test_operands_of_the_selected_kernel_may_be_named() -> None:
    """As by torch 2.11, whose convolutions would not be traced at all else."""
    given = {"input": torch.randn(2, 3, 9, 9), "weight": torch.randn(8, 3, 3, 3), "bias": None}
    rest = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False}
    window = {**rest, "output_padding": [0, 0], "groups": 1}
    select = torch._C._select_conv_backend
    assert select(**given, **window) == select(given["input"], given["weight"], bias=None, **window)
    with any_kernels():
        assert select(**given, **window)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_pads_have_the_declared_strides(
    mode: str, dims: int, channels: int, fmt: torch.memory_format
) -> None:
    """Seen with torch 2.11 (images) to 2.13 (volumes, and gradients): channels-last stays, row-major was declared.

    A convolution's gradient behind such a pad took another kernel of the library than eager, and erred more.
    """
    if dims == 3 and fmt is torch.channels_last:
        fmt = torch.channels_last_3d
    x = torch.empty((2, channels, 6, 5, 4)[: 2 + dims]).normal_().to(memory_format=fmt)
    if fmt is not torch.contiguous_format:
        x = x.clone(memory_format=fmt)
    name = {"reflect": "reflection", "replicate": "replication"}[mode] + f"_pad{dims}d"
    forward = getattr(torch.ops.aten, name).default
    backward = getattr(torch.ops.aten, name + "_backward").default
    y = forward(x, [1] * 2 * dims)
    for op, given in ((forward, (x,)), (backward, (y, x)), (backward, (y.contiguous(), x))):
        made = op(*given, [1] * 2 * dims)
        with FakeTensorMode() as mode_:
            told = op(*map(mode_.from_tensor, given), [1] * 2 * dims)
        assert (told.shape, told.stride()) == (made.shape, made.stride())


def test_unbatched_and_named_pads_are_declared() -> None:
    x = torch.randn(3, 6, 5)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert torch.ops.aten.reflection_pad2d(fake, [1, 1, 2, 2]).shape == (3, 10, 7)
        assert torch.ops.aten.replication_pad2d(self=fake, padding=[1, 1, 2, 2]).stride() == (70, 7, 1)


def test_declarations_outlast_an_export_of_torchs() -> None:
    """Seen with torch 2.13: it takes out what fake tensors are told of the ops that it keeps whole."""
    op = torch.ops.aten.upsample_nearest2d.default
    told = op_implementations_dict.pop(op)
    x = torch.empty(0, 3, 4, 4)
    y = torch.compile(lambda x: nn.functional.interpolate(x, scale_factor=3.0), backend="tilewright")(x)
    assert y.shape == (0, 3, 12, 12) and op_implementations_dict[op] is told
    del op_implementations_dict[op]
    trace(nn.Upsample(scale_factor=3.0), (x,), [()])
    assert op_implementations_dict[op] is told


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_upsampling_of_no_images_is_declared(mode: str, dims: int) -> None:
    """Seen with torch 2.13: the check of a batch without images raised a TypeError."""
    x = torch.empty((0, 3, *[4] * dims), requires_grad=True)
    y = torch.compile(
        lambda x: nn.functional.interpolate(x + 1, scale_factor=2.0, mode=mode), backend="tilewright"
    )(x)
    assert y.shape == (0, 3, *[8] * dims)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    with FakeTensorMode() as fake, pytest.raises(RuntimeError, match="Non-empty"):
        nothing = fake.from_tensor(torch.empty((0, 3, *[0] * dims)))
        nn.functional.interpolate(nothing, size=[2] * dims, mode=mode)
