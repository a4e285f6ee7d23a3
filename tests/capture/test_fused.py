"""How attention is given to torch, so that it takes a fused routine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.capture.autograd import joint
from tilewright.capture.fused import attend_plainly, attend_without_cudnn, avoid_wrong_routines, lay_masks


def traced(device: str, *, dense: bool) -> fx.GraphModule:
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 8, device=device)
        mask = torch.empty(16, 1 if not dense else 16, device=device).expand(2, 1, 16, 16)
    graph = fx.Graph()
    x, m = graph.placeholder("x"), graph.placeholder("m")
    x.meta["example_value"], m.meta["example_value"] = q, mask
    graph.output(graph.call_function(F.scaled_dot_product_attention, (x, x, x), {"attn_mask": m}))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "dense", "laid"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_a_mask_that_repeats_an_element_is_laid_densely(device: str, dense: bool, laid: int) -> None:
    gm = traced(device, dense=dense)
    lay_masks(gm)
    assert len(gm.graph.find_nodes(op="call_method", target="contiguous")) == laid
    q, mask = torch.randn(2, 4, 16, 8), torch.randn(16, 1).expand(2, 1, 16, 16)
    torch.testing.assert_close(gm(q, mask), F.scaled_dot_product_attention(q, q, q, mask))


def test_masks_without_dims_and_of_free_sizes_are_left_alone() -> None:
    """A question about a free size would be a guard."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    free = mode.from_tensor(
        torch.empty(5, 16),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]),
    )
    gm = traced("cpu", dense=True)
    (m,) = (n for n in gm.graph.nodes if n.name == "m")
    for mask in (free.t(), mode.from_tensor(torch.tensor(True))):
        m.meta["example_value"] = mask
        before = len(env.guards)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(mask), "device", torch.device("cuda"))
            lay_masks(gm)
        assert len(env.guards) == before
        assert not gm.graph.find_nodes(op="call_method", target="contiguous")


HALF, SINGLE = torch.bfloat16, torch.float32
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


def attends(
    device: str, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype, *, trained: bool = True
) -> fx.GraphModule:
    with FakeTensorMode():
        q, k = (
            torch.empty(2, 4, n, 8, device=device, dtype=dtype, requires_grad=trained) for n in (16, keys)
        )
        mask = torch.empty(16, keys, device=device, dtype=mask_dtype)
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("q", "k", "m")]
    for node, example in zip(given, (q, k, mask), strict=True):
        node.meta["example_value"] = example
    a, b, m = given
    graph.output(
        graph.call_function(F.scaled_dot_product_attention, (a,), {"key": b, "value": b, "attn_mask": m})
    )
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "keys", "dtype", "mask_dtype", "routine"),
    [
        ("cuda", 64, HALF, HALF, attend_without_cudnn), ("cuda", 704, HALF, torch.bool, attend_without_cudnn),
        ("cuda", 128, HALF, HALF, None), ("cuda", 96, HALF, HALF, None), ("cuda", 128, HALF, SINGLE, attend_plainly),
        ("cuda", 192, HALF, SINGLE, attend_plainly), ("cuda", 128, SINGLE, SINGLE, None),
        ("cpu", 64, HALF, SINGLE, None),
    ],
)  # fmt: skip
def test_masks_that_cudnn_gets_wrong_go_to_another_routine(
    device: str, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype, routine: Callable[..., object] | None
) -> None:
    gm = attends(device, keys, dtype, mask_dtype)
    avoid_wrong_routines(gm)
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
    assert node.target is (routine or F.scaled_dot_product_attention)
    q, k = torch.randn(2, 4, 16, 8, dtype=dtype), torch.randn(2, 4, keys, 8, dtype=dtype)
    mask = (torch.randn(16, keys) > 0).to(mask_dtype)
    added = mask if mask_dtype == torch.bool else mask.double()
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), k.double(), added)
    torch.testing.assert_close(gm(q, k, mask).double(), wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(("keys", "mask_dtype"), [(64, HALF), (128, SINGLE)])
def test_what_takes_no_gradients_keeps_its_routine(keys: int, mask_dtype: torch.dtype) -> None:
    gm = attends("cuda", keys, HALF, mask_dtype, trained=False)
    avoid_wrong_routines(gm)
    assert gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


@pytest.mark.parametrize("grad", [True, False])
def test_dynamo_tells_what_takes_gradients(*, grad: bool) -> None:
    seen: list[bool] = []

    def backend(gm: fx.GraphModule, _: object) -> Callable[..., object]:
        (node,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        seen.append(any(n.meta["example_value"].requires_grad for n in node.all_input_nodes))
        return gm.forward

    layer = torch.nn.Linear(8, 8)

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = layer(x)
        return F.scaled_dot_product_attention(q, q, q, mask)

    with torch.set_grad_enabled(grad):
        torch.compile(program, backend=backend)(torch.randn(1, 2, 4, 8), torch.zeros(4, 4))  # pyright: ignore[reportArgumentType]
    assert seen == [grad]


def test_what_hides_keys_in_a_mask_of_singles_stays_a_number() -> None:
    """As halves it would be minus infinity, and a query that sees no key would have no result."""
    gm = attends("cuda", 128, torch.float16, SINGLE)
    avoid_wrong_routines(gm)
    q, k = (torch.randn(2, 4, n, 8, dtype=torch.float16) for n in (16, 128))
    found = gm(q, k, torch.full((16, 128), -1e9))
    torch.testing.assert_close(
        found, k.float().mean(-2, keepdim=True).half().expand(found.shape), atol=2e-3, rtol=0
    )


def test_masks_are_laid_densely_for_the_other_routine() -> None:
    gm = attends("cuda", 64, HALF, HALF)
    (m,) = (n for n in gm.graph.nodes if n.name == "m")
    with FakeTensorMode():
        m.meta["example_value"] = torch.empty(16, 1, device="cuda", dtype=HALF).expand(16, 64)
    avoid_wrong_routines(gm)
    lay_masks(gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    given: list[torch.Tensor] = []
    node.target = lambda q, attn_mask, **_: (given.append(attn_mask), q)[1]
    gm.recompile()
    gm(
        *(torch.randn(2, 4, n, 8, dtype=HALF) for n in (16, 64)),
        torch.randn(16, 1, dtype=HALF).expand(16, 64),
    )
    assert given[0].is_contiguous() and given[0].dtype is HALF


def test_what_is_computed_again_for_gradients_is_looked_at() -> None:
    """Its graph is a part of the program's."""
    inner = attends("cuda", 64, HALF, HALF)
    root, graph = torch.nn.Module(), fx.Graph()
    root.add_module("wrap_body_0", inner)
    given = [graph.placeholder(name) for name in ("q", "k", "m")]
    graph.output(graph.call_module("wrap_body_0", tuple(given)))
    gm = fx.GraphModule(root, graph)
    avoid_wrong_routines(gm)
    assert inner.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    q, k = (torch.randn(2, 4, n, 8, dtype=HALF) for n in (16, 64))
    mask = torch.randn(16, 64, dtype=HALF)
    torch.testing.assert_close(gm(q, k, mask), F.scaled_dot_product_attention(q, k, k, mask))


def test_programs_that_are_trained_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(joint, "avoid_wrong_routines", seen.append)
    x = torch.randn(2, 3, requires_grad=True)
    torch.compile(lambda x: x * 2, backend="tilewright")(x).sum().backward()
    assert seen


def test_a_free_number_of_keys_may_be_one_that_cudnn_gets_wrong() -> None:
    """Another routine is taken without a question about the size, which would be a guard."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    free = StatelessSymbolicContext(
        [DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    gm = attends("cuda", 128, HALF, HALF)
    (k,) = (n for n in gm.graph.nodes if n.name == "k")
    k.meta["example_value"] = mode.from_tensor(torch.empty(2, 4, 128, 8), symbolic_context=free)
    avoid_wrong_routines(gm)
    assert gm.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    assert not env.guards


Enabled = tuple[bool, bool, bool, bool]


def enabled() -> Enabled:
    """Whether torch may take cuDNN, flash, memory-efficient and plain attention."""
    cuda = torch.backends.cuda
    return (
        cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attend", "allowed", "meanwhile"),
    [
        (attend_without_cudnn, (True, True, True, True), (False, True, True, True)),
        (attend_without_cudnn, (True, False, False, False), (True, False, False, False)),
        (attend_plainly, (True, True, True, True), (False, False, False, True)),
        (attend_plainly, (True, False, False, True), (False, False, False, True)),
        (attend_plainly, (True, True, False, False), (True, True, False, False)),
    ],
)
def test_what_torch_may_take_stays_as_it_is(
    attend: Callable[..., object], allowed: Enabled, meanwhile: Enabled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a program allows alone is taken."""
    seen: list[Enabled] = []

    def watched(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        seen.append(enabled())
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q = torch.randn(1, 2, 4, 8)
    with sdpa_kernel([b for b, may in zip(BACKENDS, allowed, strict=True) if may]):
        attend(q, q, q)
        assert seen == [meanwhile]
        assert enabled() == allowed


def test_fused_attention_gets_rows_where_a_norm_keeps_channels_last() -> None:
    """The norm's kernel lays its result as its operand lies. Torch chose the routine for rows side by side."""

    def program(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        return F.scaled_dot_product_attention(normed, normed, normed, is_causal=True)

    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x), program(x))
