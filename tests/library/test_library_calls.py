"""Library calls with frozen weights: packed, absorbing what follows where they may, and as exact as eager."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.library_calls import agrees, calls, captured, fast, generated, products
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.interp import run_graph
from tilewright.library.offers.offer import Maker, flushed
from tilewright.library.offers.onednn import OpenLinear
from tilewright.target import PRESETS

MAKERS = pytest.mark.parametrize("own", [False, True], ids=["library", "own"])
ACTIVATIONS = {
    "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "leaky": nn.LeakyReLU(0.2), "relu": nn.ReLU(), "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.75), "hardsigmoid": nn.Hardsigmoid(),
}  # fmt: skip
HIDES_NAN = {"relu", "relu6", "hardtanh", "hardsigmoid"}
"""Those that the library computes so that NaN becomes a number."""


def maker(own: bool) -> Maker | None:
    return products() if own else None


class Then(nn.Module):
    """A layer, then a function of its result and of its input."""

    def __init__(self, layer: nn.Module, after: object) -> None:
        super().__init__()
        self.layer, self.after = layer, after

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.after(self.layer(x), *others)  # type: ignore[operator]


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).eval()


@MAKERS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_linear_layer_takes_the_activation_behind_it(name: str, own: bool) -> None:
    m, x = chain(nn.Linear(96, 130), ACTIVATIONS[name]), torch.randn(2, 50, 96)
    g = fast(captured(m, [x]), maker(own))
    assert calls(g) == ["linear" if own else "onednn.linear"]
    assert bool(generated(g)) == (not own and name in HIDES_NAN)
    agrees(g, m, [x])


@MAKERS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_convolution_takes_the_activation_behind_it(name: str, own: bool) -> None:
    m = chain(nn.Conv2d(16, 32, 3, padding=1), ACTIVATIONS[name], nn.Conv2d(32, 16, 1))
    x = torch.randn(2, 16, 9, 11)
    g = fast(captured(m, [x]), maker(own))
    assert len(calls(g)) == 2
    assert bool(generated(g)) == (not own and name in HIDES_NAN)
    agrees(g, m, [x])


@MAKERS
def test_without_the_wish_for_nan_the_library_takes_relu(own: bool) -> None:
    m, x = chain(nn.Linear(96, 130), nn.ReLU()), torch.randn(100, 96)
    assert not generated(fast(captured(m, [x]), maker(own), exact=False))


@MAKERS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinities_pass_as_in_eager(name: str, own: bool) -> None:
    m, x = chain(nn.Linear(96, 130), ACTIVATIONS[name]), torch.randn(100, 96)
    x[3, 4] = float("nan")
    if name != "gelu":  # of which eager makes NaN for an infinity, and the formula does not
        x[5, 6], x[7, 8] = float("inf"), -float("inf")
    g = fast(captured(m, [x]), maker(own))
    with torch.no_grad():
        want = m(x).numpy()
    (got,) = run_graph(g, [x])
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(np.asarray(got)), test(want))


@MAKERS
def test_a_bias_that_comes_as_a_sum_is_taken(own: bool) -> None:
    m, x = _Shifted(130).eval(), torch.randn(100, 96)
    g = fast(captured(m, [x]), maker(own))
    assert len(calls(g)) == 1 and not generated(g)
    agrees(g, m, [x])


class _Shifted(nn.Module):
    """The product of a model file: matrix product, then the sum with a vector, then an activation in pieces."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(96, columns, generator=generator))
        self.bias = nn.Parameter(torch.randn(columns, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight) + self.bias
        return y * torch.sigmoid(y)


@pytest.mark.parametrize("shape", [(2, 50, 96), (1, 100, 96), (2, 3, 20, 96), (100, 96)])
def test_leading_dims_are_not_flattened(shape: tuple[int, ...]) -> None:
    m, x = chain(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 96)), torch.randn(shape)
    for own in (False, True):
        g = fast(captured(m, [x]), maker(own))
        assert [op.expr for op in g.ops] == [None, None], g.show()
        assert g.ops[0].output.shape == (*g.ops[0].inputs[0].shape[:-1], g.ops[0].output.shape[-1])
        agrees(g, m, [x])


@MAKERS
def test_leading_dims_may_be_dynamic(own: bool) -> None:
    m = chain(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 96))
    x = torch.randn(3, 70, 96)
    g = fast(captured(m, [x], dynamic=[[True, True, False]]), maker(own))
    assert len(calls(g)) == 2 and not generated(g), g.show()
    for shape in [(2, 70, 96), (5, 31, 96)]:
        agrees(g, m, [torch.randn(shape)])


@MAKERS
@pytest.mark.parametrize("options", [
    {"stride": 2}, {"dilation": 2, "padding": 2}, {"groups": 4}, {"groups": 32}, {"kernel_size": 1},
    {"kernel_size": (1, 5), "padding": (0, 2)}, {"bias": False}, {"kernel_size": 5, "groups": 32, "padding": 2},
    {"kernel_size": 7, "stride": 3, "padding": 3},
])  # fmt: skip
def test_convolutions_of_every_kind(options: dict[str, object], own: bool) -> None:
    given = {"kernel_size": 3, **options}
    m = chain(nn.Conv2d(32, 32, **given), nn.Hardswish(), nn.Conv2d(32, 8, 1))  # type: ignore[arg-type]
    x = torch.randn(2, 32, 17, 13)
    g = fast(captured(m, [x]), maker(own))
    assert len(calls(g)) == 2 and not generated(g)
    agrees(g, m, [x])


@MAKERS
def test_batch_height_and_width_may_be_dynamic(own: bool) -> None:
    m = chain(
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.Conv2d(32, 16, 1),
    )
    x = torch.randn(2, 16, 20, 24)
    g = fast(captured(m, [x], dynamic=[[True, False, True, True]]), maker(own))
    assert len(calls(g)) == 3
    for shape in [(2, 16, 20, 24), (3, 16, 11, 35)]:
        agrees(g, m, [torch.randn(shape)])


def test_transposed_and_volume_convolutions() -> None:
    for layer, shape in [
        (nn.ConvTranspose2d(16, 24, 3, stride=2, padding=1, output_padding=1), (2, 16, 9, 9)),
        (nn.ConvTranspose2d(16, 24, 2, stride=2, groups=2), (2, 16, 9, 9)),
        (nn.Conv3d(8, 16, 3, padding=1), (2, 8, 5, 6, 7)),
    ]:
        m, x = chain(layer, nn.SiLU(), nn.Tanh()), torch.randn(shape)
        for own in (False, True):
            g = fast(captured(m, [x]), maker(own))
            assert calls(g) == ["onednn.convolution"]
            agrees(g, m, [x])


class _Block(nn.Module):
    """A residual block whose second operand is made by a convolution."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(32, 32, k, padding=k // 2) for k in (1, 3, 1))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        side = self.first(x)
        y = F.relu(self.second(F.silu(side)) + side if self.twice else self.second(x) + side)
        return self.last(y)


@MAKERS
def test_a_residual_sum_and_its_relu_are_taken(own: bool) -> None:
    m, x = _Block().eval(), torch.randn(2, 32, 9, 9)
    g = fast(captured(m, [x]), maker(own), exact=own)
    assert len(calls(g)) == 3 and not generated(g), g.show()
    agrees(g, m, [x])


def test_memory_is_not_written_over_while_a_kernel_reads_it() -> None:
    """The library adds in place: `silu(side)` might be computed again later, from memory that is gone by then."""
    m, x = _Block(twice=True).eval(), torch.randn(2, 32, 9, 9)
    g = fast(captured(m, [x]), exact=False)
    assert "add" in [op.name for op in generated(g)]
    agrees(g, m, [x])
    own = fast(captured(m, [x]), products())
    assert "add" not in [op.name for op in generated(own)]
    agrees(own, m, [x])


@MAKERS
def test_a_residual_of_a_linear_layer(own: bool) -> None:
    m = Then(nn.Linear(96, 96), lambda y, r: torch.tanh(r + y)).eval()
    args = [torch.randn(4, 50, 96), torch.randn(4, 50, 96)]
    g = fast(captured(m, args), maker(own))
    assert bool(generated(g)) == (not own)
    agrees(g, m, args)


REFUSALS = {
    "two readers": lambda y: F.gelu(y) + y.sum(-1, keepdim=True),
    "broadcast second operand": lambda y: y + y[:1] * 2,
    "shifted read": lambda y: F.gelu(torch.roll(y, 1, -1)),
    "another activation": lambda y: F.elu(y),
    "a reduction": lambda y: torch.softmax(y, -1),
    "another type": lambda y: F.gelu(y.double()).float(),
}


@MAKERS
@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_no_epilogue_stays(why: str, own: bool) -> None:
    m, x = Then(nn.Linear(96, 130), REFUSALS[why]).eval(), torch.randn(100, 96)
    g = fast(captured(m, [x]), maker(own))
    assert calls(g) == ["linear" if own else "onednn.linear"] and generated(g)
    agrees(g, m, [x])


@MAKERS
def test_a_result_that_leaves_the_graph_is_not_touched(own: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(96, 130)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y, F.gelu(y)

    m, x = Both().eval(), torch.randn(100, 96)
    g = fast(captured(m, [x]), maker(own))
    assert len(generated(g)) == 1
    for got, want in zip(run_graph(g, [x]), m(x), strict=True):
        np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_result_with_given_strides_is_left_to_a_kernel() -> None:
    m, x = chain(nn.Conv2d(16, 32, 3), nn.SiLU()), torch.randn(1, 16, 9, 9)
    assert [op.name for op in generated(fast(captured(m, [x])))] == ["silu"]


def test_small_and_half_products_stay_plain() -> None:
    small, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    assert calls(fast(captured(small, [x]), products())) == ["aten.addmm"]
    half, y = nn.Linear(96, 130).bfloat16().eval(), torch.randn(100, 96).bfloat16()
    assert calls(fast(captured(half, [y]), products())) == ["aten.addmm"]


def test_weights_that_are_not_finite_stay_with_the_library() -> None:
    m, x = nn.Conv2d(16, 32, 3, padding=1).eval(), torch.randn(1, 16, 5, 5)
    with torch.no_grad():
        m.weight[0, 0, 0, 0] = float("inf")
    assert calls(fast(captured(m, [x]), products())) == ["onednn.convolution"]


def test_weights_that_are_inputs() -> None:
    """Where torch's own products are slow, large ones take the other library; few rows stay."""
    m, x = nn.Linear(300, 400).eval(), torch.randn(2, 40, 300)
    others = [p.detach() for p in m.parameters()]
    for slow, name in ((True, "onednn.linear"), (False, "aten.addmm")):
        target = replace(PRESETS["x86-64-v4"], slow_products=slow)
        g = fast(captured(m, [x], frozen=False), target=target)
        assert calls(g) == [name]
        agrees(g, m, [x], *others)
    few, target = torch.randn(3, 300), replace(PRESETS["x86-64-v4"], slow_products=True)
    assert calls(fast(captured(m, [few], frozen=False), target=target)) == ["aten.addmm"]


class Gradient(nn.Module):
    """That of a weight: a product over all rows."""

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        return torch.mm(g.t(), x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_long_sums_of_products_stay_with_torch(dynamic: bool) -> None:
    """The other library sums in one chain: over thousands of rows a weight's gradient would err twice as much."""
    m, given = Gradient(), [torch.randn(3000, 192), torch.randn(3000, 192)]
    g = captured(m, given, dynamic=[[True, False]] * 2 if dynamic else None)
    g = fast(g, target=replace(PRESETS["x86-64-v4"], slow_products=True))
    ours = torch.from_numpy(np.asarray(run_graph(g, given)[0]))
    wide = m(*(t.double() for t in given))
    assert (ours - wide).norm() <= 1.2 * (m(*given) - wide).norm()


def test_a_weight_with_gaps_stays_with_torch() -> None:
    """The other library would take a thousand times as long to bring it into form."""

    x, weight = torch.randn(256, 128), torch.randn(512, 300)[:, :128].t()
    with torch.profiler.profile() as seen:
        product = OpenLinear(transposed=True)(x, weight, None)
    assert torch.equal(product, x @ weight)
    assert not any("mkldnn" in e.key for e in seen.key_averages())


def test_a_weight_seen_through_views_is_frozen() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.randn(2, 96, 130))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.both[1] @ self.both[0].t()

    m, x = Tied().eval(), torch.randn(100, 96)
    for own in (False, True):
        g = fast(captured(m, [x]), maker(own))
        assert calls(g) == ["linear" if own else "onednn.linear"] * 2
        assert not g.constants
        agrees(g, m, [x])


@MAKERS
def test_denormal_weights_are_zero(own: bool) -> None:
    """What training left of switched-off channels costs nothing; where all is so small, it stays."""
    m, x = chain(nn.Linear(96, 130)), torch.randn(200, 96)
    with torch.no_grad():
        m[0].weight[::3] *= 1e-41  # type: ignore[index,operator]
        m[0].bias[::3] *= 1e-41  # type: ignore[index,operator]
    g = fast(captured(m, [x]), maker(own))
    agrees(g, m, [x])
    (got,) = run_graph(g, [x])
    assert not np.asarray(got)[:, ::3].any() and np.asarray(got)[:, 1].any()


def test_what_is_flushed() -> None:
    normal = torch.finfo(torch.float32).tiny
    w = torch.tensor([1.0, normal, -normal, normal / 2, -1e-45, 0.0])
    assert flushed(w).tolist() == [1.0, normal, -normal, 0.0, 0.0, 0.0]
    small = w[1:]
    assert flushed(small) is small  # nothing else is there
    assert flushed(w[:3]).data_ptr() == w.data_ptr()  # nothing to do
    odd = torch.tensor([float("nan"), 1e-40, 2.0])
    assert flushed(odd)[0].isnan()


class _Affine(nn.Module):
    """A learned scale and shift behind an activation, as some networks for text have behind each layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(self.layer(x)) * 0.375 + -0.25


@pytest.mark.parametrize(
    ("layer", "reader"),
    [
        (nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 1)),
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)),
        (nn.Linear(15, 40), nn.Linear(40, 20)),
    ],
    ids=["convolution", "depthwise", "linear"],
)
def test_a_scale_and_a_shift_behind_the_activation_are_taken(layer: nn.Module, reader: nn.Module) -> None:
    m, x = chain(_Affine(layer), reader), torch.randn(8, 16, 19, 15)
    g = fast(captured(m, [x]), maker(True))
    assert not generated(g), g.show()
    agrees(g, m, [x])
