"""Ops over lists that write what they read for a later tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewright.capture.aliasing.lists import write_lists_in_order
from tilewright.capture.aliasing.overlapping import OverlappingWrite

List = list[Tensor]


def _added(xs: List) -> object:
    torch._foreach_add_(xs, [xs[0]] * len(xs))


def _added_by_name(xs: List) -> object:
    torch._foreach_add_(self=xs, other=[xs[0]] * len(xs))


def _swapped(xs: List) -> object:
    torch._foreach_copy_(xs, xs[::-1])


def _twice(xs: List) -> object:
    torch._foreach_add_([xs[0], xs[0], xs[1]], [xs[1], xs[2], xs[0]], alpha=0.5)


def _by_one_number(xs: List) -> object:
    sums = [x.sum() for x in xs]
    torch._foreach_mul_(sums, sums[1])
    return sums


def _returned(xs: List) -> object:
    return torch._foreach_abs_([xs[0], xs[0], xs[1]])


def _numbers(xs: List) -> object:
    torch._foreach_mul_([xs[0]] * 3, [2.0, 3.0, 5.0])
    torch._foreach_addcdiv_(xs, [xs[1]] * 3, [xs[2]] * 3, value=2)


def _parts_of_one(xs: List) -> object:
    flat = torch.cat(xs)
    torch._foreach_add_([flat[0:3], flat[2:5]], [flat[4:7], flat[5:8]])
    return flat


def _in_steps(xs: List) -> object:
    for _ in range(4):
        torch._foreach_add_(xs, [xs[0]] * len(xs))
        torch._foreach_mul_(xs, [0.5, 0.25, 2.0])


@pytest.mark.parametrize(
    "program",
    [_added, _added_by_name, _swapped, _twice, _by_one_number, _returned, _numbers, _parts_of_one, _in_steps],
    ids=lambda f: f.__name__.strip("_"),
)
def test_each_tensor_reads_what_the_ones_before_it_wrote(program: Callable[[List], object]) -> None:
    torch.manual_seed(0)
    xs = [torch.randn(3) for _ in range(3)]
    ours = [x.clone() for x in xs]
    expected = program(xs)
    made = torch.compile(program, backend="tilewright", options={"strict": True})(ours)
    torch.testing.assert_close((ours, made), (xs, expected))


def test_gradients_flow_through_lists_written_in_order() -> None:
    """Eager mode itself forgets for such a list that the first tensor was written: one by one it does not."""

    def program(x: Tensor, y: Tensor, *, apart: bool = False) -> Tensor:
        xs = [x * 2, y * 3, x * y]
        for part in [[t] for t in xs] if apart else [xs]:
            torch._foreach_add_(part, [xs[0]] * len(part))
        return xs[0] + xs[1] * xs[2]

    torch.manual_seed(0)
    x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(torch.compile(program, backend="tilewright")(x, y).sum(), (x, y))
    torch.testing.assert_close(found, torch.autograd.grad(program(x, y, apart=True).sum(), (x, y)))


@pytest.mark.parametrize("size", [4, None], ids=["apart", "of free sizes"])
def test_lists_whose_tensors_lie_apart_stay_one_op(size: int | None) -> None:
    """Views of one flat tensor, as those of gradients."""
    counts: list[int] = []

    def count(gm: torch.fx.GraphModule, _: object) -> object:
        write_lists_in_order(gm)
        counts.append(sum("foreach" in str(n.target) for n in gm.graph.nodes))
        return gm

    def program(flat: Tensor, grads: List) -> None:
        torch._foreach_add_(list(flat.split(4)) if size else [flat[: len(flat) // 2], flat[1:]], grads)

    flat = torch.randn(8)
    if size is None:
        torch._dynamo.mark_dynamic(flat, 0)
    torch.compile(program, backend=count, dynamic=size is None)(flat, [torch.ones(1), torch.ones(1)])
    assert counts == ([1] if size else [2])


def test_results_that_are_used_as_a_whole_are_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(3)
    made = graph.call_function(torch._foreach_abs_, ([x, x],))
    graph.output(made)
    with pytest.raises(OverlappingWrite, match="used as a whole"):
        write_lists_in_order(torch.fx.GraphModule(torch.nn.Module(), graph))
