"""Which ops may share a kernel with a product of matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.library_calls import captured
from torch import Tensor, nn

from tilewright.ir.graph import Graph
from tilewright.partition.products import find_products
from tilewright.rewrite.normal.frozen_masks import recognise_masks
from tilewright.rewrite.normal.normalise import normalise


class Net(nn.Module):
    """Three layers of one shape, and one back, in a function of them and x."""

    def __init__(self, body: Callable[[Net, Tensor], object], bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 32, bias=bias) for _ in range(3))
        self.back = nn.Linear(32, 16, bias=bias)
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self, x)


def graph_of(
    body: Callable[[Net, Tensor], object], dtype: torch.dtype = torch.float16, bias: bool = True
) -> Graph:
    x = torch.randn(2, 3, 16).to(dtype)
    return normalise(captured(Net(body, bias).to(dtype), (x,), frozen=False))


def groups(body: Callable[[Net, Tensor], object], **options: object) -> list[list[str]]:
    graph = graph_of(body, **options)  # type: ignore[arg-type]
    found = find_products(graph)
    owned = [op for g in found for op in g.region.own]
    assert len(owned) == len(set(owned))
    for group in found:
        group.region.graph(graph).verify()
    return [[op.name for op in g.region.ops] for g in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda m, x: m.a(x), [["matmul", "bias"]]),
        (lambda m, x: (x @ x.mT).relu(), [["matmul", "narrow", "relu"]]),
        (lambda m, x: F.gelu(m.a(x)), [["matmul", "bias", "gelu"]]),
        (lambda m, x: m.back(F.relu(m.a(x))) + x, [["matmul", "bias", "relu"], ["matmul", "bias", "add"]]),
        (lambda m, x: (h := m.a(x)) * torch.sigmoid(h), [["matmul", "bias", "sigmoid", "mul"]]),
        (
            lambda m, x: F.silu(m.a(x)) * m.b(x),
            [["matmul", "bias", "silu", "matmul", "bias", "mul"]],
        ),
        (lambda m, x: m.a(x).transpose(0, 1).contiguous(), [["matmul", "bias", "copy"]]),
        (lambda m, x: m.a(x) * m.c.bias[:1].exp().cos(), [["matmul", "bias", "exp", "cos", "mul"]]),
    ],
    ids=["bare", "of itself", "gelu", "residual", "read twice", "gated", "copied", "small producers"],
)
def test_what_stands_behind_a_product_joins_it(
    body: Callable[[Net, Tensor], object], expected: list[list[str]]
) -> None:
    assert groups(body) == expected


@pytest.mark.parametrize(("width", "joins"), [(1, True), (2, False), (8, False), (16, True), (32, True)])
def test_what_mixes_rows_and_columns_along_memory_stays_outside(width: int, joins: bool) -> None:
    """As a shuffle of pixels does: `width` columns of one row, then as many of the next. With one there are only rows
    along memory, and 16 halves are what memory takes at once."""

    def body(m: Net, x: Tensor) -> Tensor:
        return m.a(x).view(2, 3, 32 // width, width).transpose(1, 2).reshape(2, 32 // width, 3 * width).relu()

    assert groups(body) == [["matmul", "bias", "relu"] if joins else ["matmul", "bias"]]


@pytest.mark.parametrize(("rows", "joins"), [(8, True), (16, True), (12, False)])
def test_turns_of_rows_and_columns_may_be_stored_together(rows: int, *, joins: bool) -> None:
    """Two columns of each of eight rows are as much as memory takes at once; with twelve, turns begin anywhere."""

    def body(m: Net, x: Tensor) -> Tensor:
        wide = m.a(x.repeat(1, 4, 1)[:, :1].expand(2, rows, 16).contiguous())
        return wide.view(2, rows, 16, 2).transpose(1, 2).reshape(2, 16, 2 * rows).relu()

    (names,) = groups(body)
    assert ("relu" in names) is joins


def test_products_of_the_same_rows_stand_together() -> None:
    (names,) = groups(lambda m, x: (m.a(x), m.b(x), m.c(x)))
    assert names == ["matmul", "bias"] * 3


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # the value before the activation is needed too
        (lambda m, x: (h := m.a(x), F.gelu(h)), [["matmul", "bias"]]),
        # the mean waits for all of the product
        (lambda m, x: (h := m.a(x)) - h.mean(), [["matmul", "bias"]]),
        # rows that the first product makes
        (lambda m, x: m.back(m.a(x)), [["matmul", "bias"], ["matmul", "bias"]]),
        # the second factor hangs on the first, by a way outside
        (
            lambda m, x: (h := m.a(x)) * m.b(torch.softmax(h, -1)[..., :16]),
            [["matmul", "bias"], ["matmul", "narrow", "add", "mul"]],
        ),
        # other sizes behind it
        (lambda m, x: m.a(x).sum(-1), [["matmul", "bias"]]),
        (lambda m, x: F.pad(m.a(x), (1, 1)), [["matmul", "bias"]]),
    ],
    ids=["kept", "reduction", "chain", "dependent", "sum", "larger"],
)
def test_what_waits_or_is_needed_stays_outside(
    body: Callable[[Net, Tensor], object], expected: list[list[str]]
) -> None:
    assert groups(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # a softmax takes halves as singles, as it would those of a library
        (lambda m, x: torch.softmax((m.a(x) * 0.5).float(), -1).half() @ m.back.weight.mT,
         [["matmul", "bias", "mul"], ["matmul", "narrow"]]),
        # who gets the singles gets them of the group
        (lambda m, x: m.a(x).float(), [["matmul", "bias", "cast"]]),
        # halves again in the end
        (lambda m, x: (m.a(x).float() * 3).half().sum(-1), [["matmul", "bias", "cast", "mul", "cast"]]),
        # readers would load singles beside the halves
        (lambda m, x: (m.a(x) + x[..., :1].float() * m.b.weight[:, :1].mT.float().exp()).softmax(-1) * 2,
         [["matmul", "bias", "cast", "add"]]),
    ],
    ids=["made wider", "kept", "made narrow", "of more"],
)  # fmt: skip
def test_what_makes_more_bytes_of_a_product_is_left_to_readers(
    body: Callable[[Net, Tensor], object], expected: list[list[str]]
) -> None:
    assert groups(body) == expected


def crossed(m: Net, x: Tensor) -> tuple[Tensor, ...]:
    """Of either rows one product waits for one of the other rows."""
    x, wide = x.flatten(0, 1), [layer.weight.t() for layer in (m.a, m.b, m.c)]
    y = x + 1
    one, other = x @ wide[0], y @ wide[1]
    return one, other, torch.addmm(one, y, wide[2]), torch.addmm(other, x, wide[2])


def test_siblings_do_not_wait_for_each_other() -> None:
    assert len(groups(crossed)) == 1


def test_products_of_singles_are_the_librarys() -> None:
    assert groups(lambda m, x: F.gelu(m.a(x)), dtype=torch.float32) == []


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_weights_that_are_one_number_are_no_operand(weight: float) -> None:
    """Networks begin with norms whose scale is 0: folded into a convolution, its weights are."""
    one, other = (nn.Conv2d(16, 8, 1).half() for _ in range(2))
    nn.init.constant_(one.weight, weight)
    module = nn.Sequential(nn.Conv2d(16, 16, 1).half(), nn.SiLU(), Branches(one, other))
    image = torch.randn(2, 16, 8, 8).half().to(memory_format=torch.channels_last)
    module = module.to(memory_format=torch.channels_last)
    graph = normalise(recognise_masks(captured(module, (image,))))
    folded = [op for op in graph.ops if op.name == "convolution" and len(op.inputs) == 1]
    assert len(folded) == 1 and not any(op in g.region.own for g in find_products(graph) for op in folded)


class Branches(nn.Module):
    """The sum of two layers of one image."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.layers[1](x)


def test_rows_may_be_unknown_but_not_what_is_summed() -> None:
    module, x = Net(lambda m, x: F.gelu(m.a(x))).half(), torch.randn(4, 3, 16).half()
    graph = normalise(captured(module, (x,), frozen=False, dynamic=[[True, False, False]]))
    (group,) = find_products(graph)
    assert [op.name for op in group.region.ops] == ["matmul", "bias", "gelu"]
    module = Net(lambda m, x: x.mT @ m.a(x)).half()
    graph = normalise(captured(module, (x,), frozen=False, dynamic=[[False, True, False]]))
    (group,) = find_products(graph)
    assert [op.name for op in group.region.ops] == ["matmul", "bias"]
