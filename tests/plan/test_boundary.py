"""Why kernels end where they do: every one has a reason of the closed list."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tilewright
from tilewright.ir.kernel import Cover, Kernel
from tilewright.plan.boundary import Boundary, boundary_of


def boundaries(target: Callable[..., object], *inputs: Tensor, **how: object) -> list[Boundary]:
    """Of the kernels of a program, in order."""
    with torch.no_grad():
        compiled = tilewright.compile(target, inputs, options=how)  # type: ignore[arg-type]
    assert [k.boundary.value for k in compiled.kernels] == [  # type: ignore[attr-defined]
        b.value
        for b in _of_cover(compiled.trace["partition"])  # type: ignore[index]
    ]
    return _of_cover(compiled.trace["partition"])  # type: ignore[index]


def _of_cover(cover: Cover) -> list[Boundary]:
    return [boundary_of(step, cover) for step in cover.steps if isinstance(step, Kernel)]


def test_what_reads_the_result_is_the_reason_where_none_was_noted() -> None:
    big = nn.Linear(256, 256)
    assert boundaries(torch.relu, torch.randn(64, 64)) == [Boundary.RESULT]
    assert boundaries(lambda x: big(x.relu()), torch.randn(256, 256))[0] is Boundary.CALL


def test_a_law_and_a_choice_are_reasons() -> None:
    x = torch.randn(8, 32)
    assert Boundary.LAW in boundaries(lambda x: torch.softmax(x, -1).cumsum(0), x)
    found = boundaries(lambda x: torch.softmax(x, -1) * 2, x, fusion="none")
    assert set(found) == {Boundary.UNFUSED} and len(found) > 1


def test_where_nothing_was_noted_the_reader_stays_apart() -> None:
    def twice(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.softmax(x, -1) @ torch.softmax(x, 0)
        return x

    found = boundaries(twice, torch.randn(16, 16))
    assert found[-1] is Boundary.RESULT and set(found) <= set(Boundary)
