"""What kernels store: the narrow one of two equal results, and parts of one value as parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from tests.partition.graphs import called
from tests.support.cpp_harness import host_target
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import bf16, f32
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import Cover, Kernel
from tilewright.ir.ops import pointwise as p
from tilewright.ir.ops.reduce import sum_
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.partition.greedy import Merging
from tilewright.partition.kernel_ops import GraphParts
from tilewright.partition.unstored_results import without_recomputed
from tilewright.schedule.solver import Solver

Program = Callable[[Builder, Value], tuple[Value, ...]]
ROWS, COLUMNS = dims.integer(256), dims.integer(384)


def covered(run: Program) -> Cover:
    b = Builder()
    x = b.value((ROWS, COLUMNS), bf16)
    graph = b.finish((x,), run(b, x))
    return partition(graph, Solver(host_target(), Options()).price, NO_HINTS)


def stored(cover: Cover) -> list[tuple[str, tuple[str, ...]]]:
    """The type and sizes of what kernels store."""
    values = [v for step in cover.steps if isinstance(step, Kernel) for v in step.outputs]
    return sorted((v.dtype.name, tuple(str(n) for n in v.shape)) for v in values)


def half_and_single(b: Builder, x: Value) -> tuple[Value, ...]:
    """A half that is returned, and read as a single before a call and behind it."""
    half = p.mul(b, x, p.tanh(b, x))
    single = p.to(b, half, f32)
    other = called(b, p.to(b, sum_(b, single, (1,), True), bf16))
    return half, p.sub(b, single, p.to(b, other, f32))


def test_a_half_that_is_stored_is_not_stored_as_a_single_too() -> None:
    whole = ("256", "384")
    assert stored(covered(half_and_single)) == [("bf16", ("256", "1")), ("bf16", whole), ("f32", whole)]


def test_what_a_kernel_makes_of_a_half_for_others_is_stored_as_the_half() -> None:
    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        single = p.to(b, p.mul(b, x, p.tanh(b, x)), f32)
        other = called(b, p.to(b, sum_(b, single, (1,), True), bf16))
        return (p.sub(b, single, p.to(b, other, f32)),)

    assert stored(covered(run)) == [("bf16", ("256", "1")), ("bf16", ("256", "384")), ("f32", ("256", "384"))]


def test_kernels_that_would_have_no_legal_form_stay_as_they_are() -> None:
    b = Builder()
    x = b.value((ROWS, COLUMNS), bf16)
    graph = b.finish((x,), half_and_single(b, x))
    parts, price = GraphParts(graph, NO_HINTS), Solver(host_target(), Options()).price
    groups, inlined = Merging(parts, price).groups(), set(parts.inlined)
    asked: list[Kernel] = []

    def refusing(kernel: Kernel, layouts: Mapping[Value, Layout]) -> float:
        del layouts
        asked.append(kernel)
        raise IllegalSchedule("no", law="a test", phase="partition")

    assert [g.places for g in without_recomputed(parts, groups, refusing)] == [g.places for g in groups]
    assert asked and parts.inlined == inlined
    assert sum(len(g.places) for g in without_recomputed(parts, groups, price)) < sum(
        len(g.places) for g in groups
    )


@pytest.mark.parametrize("times, stay", [(1.2, False), (1.5, True)])
def test_kernels_that_would_be_much_slower_stay_as_they_are(times: float, stay: bool) -> None:
    b = Builder()
    x = b.value((ROWS, COLUMNS), bf16)
    graph = b.finish((x,), half_and_single(b, x))
    parts, price = GraphParts(graph, NO_HINTS), Solver(host_target(), Options()).price
    groups = Merging(parts, price).groups()
    known = {k.ops: price(k, parts.layouts) for k in (parts.kernel(g.places) for g in groups)}

    def slower(kernel: Kernel, layouts: Mapping[Value, Layout]) -> float:
        del layouts
        like = max(known, key=lambda ops: len({*ops} & {*kernel.ops}))
        return known[like] * (1 if like == kernel.ops else times)

    left = [g.places for g in without_recomputed(parts, groups, slower)]
    assert (left == [g.places for g in groups]) is stay


def test_what_is_made_of_more_than_itself_is_stored() -> None:
    def run(b: Builder, x: Value) -> tuple[Value, ...]:
        y, z = called(b, x), called(b, called(b, x))
        both = p.add(b, y, z)
        other = called(b, p.to(b, sum_(b, both, (1,), True), bf16))
        return p.sub(b, both, other), p.mul(b, both, called(b, other))

    assert ("bf16", ("256", "384")) in stored(covered(run))


class Attention(torch.nn.Module):
    """Queries, keys and values of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16, 64] to [batch, 2, 16, 32]."""
        q, k, v = self.qkv(x).reshape(-1, 16, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("dynamic", [False, True])
def test_queries_keys_and_values_are_saved_as_one_tensor(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(4, 16, 64, requires_grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = torch.compile(model, backend=tilewright.backend, dynamic=dynamic)(x)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (right,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, right)
    parts = [t for t in saved if t.dim() == 4 and t.stride(2) == 192]
    assert len(parts) == 3 and len({t.untyped_storage().data_ptr() for t in parts}) == 1


def test_a_clone_of_what_is_saved_has_memory_of_its_own() -> None:
    torch.manual_seed(0)
    model = Attention()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        made = model.qkv(x)
        q, k, v = made.reshape(-1, 16, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v), made.clone()[..., :64]

    x = torch.randn(4, 16, 64, requires_grad=True)
    found = []
    for f in (both, torch.compile(both, backend=tilewright.backend)):
        out, copy = f(x)
        with torch.no_grad():
            copy.zero_()
        found += torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(found[1], found[0])


def test_parts_of_two_storages_never_share() -> None:
    def f(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x @ w
        z = y.clone()
        return [y[:, ::2], y[:, 1::2], z[:, ::2], z[:, 1::2]]

    x, w = (torch.randint(-4, 5, (256, 256)).float() for _ in range(2))
    with torch.no_grad():
        found = torch.compile(f, backend=tilewright.backend)(x, w)
        found[2].zero_()
    torch.testing.assert_close(found[0], (x @ w)[:, ::2])
    assert found[0].untyped_storage().data_ptr() != found[2].untyped_storage().data_ptr()
