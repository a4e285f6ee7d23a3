"""Views of one product that a program returns: where they have elements in common they stay in one memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.ir.dtype import DTYPES
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import ViewStep
from tilewright.ir.sizes import dims
from tilewright.partition import kernel_ops
from tilewright.partition.kernel_ops import are_apart, meeting

PROGRAMS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a row and all": lambda y: (lambda v: (v[:, -1:], v.transpose(0, 1)))(y.chunk(3, -1)[2]),
    "less than the whole": lambda y: (lambda v: (v[:4], v[2:]))(y.unbind(0)[0]),
    "read by kernels": lambda y: (lambda v: (v[:4], v[2:], v[2:].sin().sum(0)))(y.unbind(0)[0]),
    "made by a kernel": lambda y: (lambda v: (v[:4], v[2:], v[2:].exp()))(y.tanh().unbind(0)[0]),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_are_seen_in_what_overlaps(name: str, grad: bool) -> None:
    x, w = torch.randn(2, 6, 8, requires_grad=grad), torch.randn(8, 24)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return PROGRAMS[name](x @ w)

    results = []
    for f in (program, torch.compile(program, backend=tilewright.backend)):
        made = [t.detach() for t in f(x)]
        made[0].fill_(7.0)
        results.append(made)
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.squeeze().stride() == eager.squeeze().stride()


def test_small_parts_that_are_apart_are_not_held_by_the_whole() -> None:
    x, w = torch.randn(64, 8), torch.randn(8, 64)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x @ w).unbind(0)
        return rows[3], rows[5]

    found = torch.compile(program, backend=tilewright.backend)(x)
    torch.testing.assert_close(found, program(x))
    assert all(t.untyped_storage().nbytes() == 64 * 4 for t in found)


SOURCE = Value(0, (dims.integer(4096),), DTYPES["f32"])
NUMBER = count(1)


def view(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> ViewStep:
    """A view of one source."""
    value = Value(next(NUMBER), tuple(map(dims.integer, shape)), DTYPES["f32"])
    return ViewStep(value, SOURCE, Layout(tuple(map(dims.integer, strides))), dims.integer(offset))


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (view((6, 8), (24, 1), 0), view((6, 8), (24, 1), 8), True),
        (view((6, 8), (24, 1), 4), view((6, 8), (24, 1), 8), False),
        (view((9, 4), (8, 2), 0), view((9, 4), (8, 2), 1), True),
        (view((4, 8), (8, 1), 0), view((4, 8), (8, 1), 16), False),
        (view((2, 8), (8, 1), 0), view((4, 8), (8, 1), 16), True),
        (view((2, 1, 8), (144, 24, 1), 136), view((6, 2, 8), (24, 144, 1), 16), False),
        (view((6, 20), (24, 1), 8), view((6, 8), (24, 1), 0), False),
    ],
)
def test_which_views_are_apart(a: ViewStep, b: ViewStep, apart: bool) -> None:
    assert are_apart(a, b) is apart and are_apart(b, a) is apart


def test_many_parts_side_by_side_are_told_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of a matrix, in any order; one that lies across leaves all where they are."""
    rows = [view((100,), (1,), 100 * k) for k in (3, 1, 2, 0, *range(4, 60))]
    columns = [view((100,), (60,), k) for k in range(60)]
    monkeypatch.setattr(kernel_ops, "are_apart", lambda *_: pytest.fail("held against each other"))
    assert meeting(rows) == meeting(columns) == []
    across = [*rows, view((2, 60), (100, 1), 140)]
    assert meeting(across) == across
