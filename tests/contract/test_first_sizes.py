"""What is decided about a graph of unknown sizes does not depend on a tiny first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import SizeHints, representative
from tilewright.ir.expr import Expr, integer, symbol
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import SIZES

Dims = dict[str, dict[int, str]]


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def h2o(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
    return p @ v, p.sum(-2)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2, w, b))


def mlp(x: Tensor, w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.softmax(torch.nn.functional.gelu(x @ w + b) @ out, -1)


def heads(n: int) -> list[Tensor]:
    return [torch.zeros(1, 2, n, 16) for _ in range(3)]


PROGRAMS: dict[str, tuple[Callable[..., object], Callable[[int], Sequence[Tensor]], Dims]] = {
    "softmax": (softmax, lambda n: [torch.zeros(n, n)], {"x": {0: "a", 1: "b"}}),
    "layer norm": (
        layer_norm,
        lambda n: [torch.zeros(n, n), torch.zeros(n), torch.zeros(n)],
        {"x": {0: "a", 1: "b"}, "w": {0: "b"}, "b": {0: "b"}},
    ),
    "attention": (attention, heads, {name: {2: "s"} for name in "qkv"}),
    "h2o": (h2o, heads, {name: {2: "s"} for name in "qkv"}),
    "group norm": (
        group_norm,
        lambda n: [torch.zeros(2, 8, n, n), torch.zeros(8), torch.zeros(8)],
        {"x": {2: "height", 3: "width"}},
    ),
    "mlp": (
        mlp,
        lambda n: [torch.zeros(n, n), torch.zeros(n, n), torch.zeros(n), torch.zeros(n, n)],
        {"x": {0: "a", 1: "b"}, "w": {0: "b", 1: "c"}, "b": {0: "c"}, "out": {0: "c", 1: "b"}},
    ),
}


CONTRACTING = ("attention", "h2o", "mlp")


@pytest.mark.parametrize(
    ("name", "contractions"),
    [*((name, "modelled") for name in PROGRAMS), *((name, "inside") for name in CONTRACTING)],
)
def test_a_tiny_first_call_makes_the_same_kernels(name: str, contractions: str) -> None:
    program, inputs, named = PROGRAMS[name]
    found: list[object] = []
    for n in (2, 512):
        tilewright.reset()
        made = tilewright.compile(
            program, tuple(inputs(n)), dims=named, options={"contractions": contractions}
        )
        found.append((str(made.coverage), [(k.name, k.ops) for k in made.kernels]))  # pyright: ignore
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "mlp"])
def test_a_tiny_first_call_makes_the_same_kernels_on_a_gpu(name: str) -> None:
    """There a launch takes as long as much work. (Where products are library calls, the kernels are those of a CPU.)"""
    program, inputs, named = PROGRAMS[name]
    dynamic = [tuple(places) for places in named.values()]
    found: list[object] = []
    for n in (2, 512):
        given = inputs(n)
        made = compiled(program, given, [*dynamic, *[()] * (len(given) - len(dynamic))], launch=3e-6)
        found.append([[op.name for op in k.kernel.ops] for k in made.kernels])
    assert found[0] == found[1]


def sizes(shape: Sequence[Expr], **traced: int) -> dict[str, int]:
    return dict(representative([dims.prod(shape)], SizeHints(traced)).sizes)


def test_tiny_sizes_are_raised_together() -> None:
    a, b = symbol("a"), symbol("b")
    assert sizes((a, b), a=2, b=2) == {"a": 1024, "b": 1024}
    assert sizes((a, b), a=512, b=512) == {"a": 1024, "b": 1024}
    assert sizes((a, b), a=3, b=1 << 15) == {"a": 32, "b": 1 << 15}


def test_sizes_that_mean_work_are_kept() -> None:
    a = symbol("a")
    assert sizes((a, integer(768), integer(768)), a=4) == {"a": 4}
    assert sizes((integer(8),)) == {}


def test_a_declared_range_bounds_them() -> None:
    few, many = symbol("few", 2, 8), symbol("many", 2)
    assert sizes((few, many), few=2, many=2) == {"few": 8, "many": SIZES.min_largest_tensor_elements // 8}
    assert sizes((few,), few=2) == {"few": 8}
    assert SizeHints({"few": 2, "other": 3}).raised(1024, [few]) == SizeHints({"few": 8, "other": 3})
    assert SizeHints({"few": 100}).estimate(few) == 8
