"""Arguments that are no tensors: None, numbers and flags, by position and by name, nested, and in exported programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError


class Scores(nn.Module):
    """A softmax whose mask comes first and may be None."""

    def forward(self, mask: Tensor | None, x: Tensor, capped: bool = True, scale: float = 2.0) -> Tensor:
        y = 5 * torch.tanh(x * scale) if capped else x * scale
        return torch.softmax(y if mask is None else y + mask, -1)


SCORES = Scores()
X, MASK = torch.linspace(-2, 2, 32).view(4, 8), torch.linspace(1, 0, 32).view(4, 8)


def same(compiled: Any, *args: object, **kwargs: object) -> None:
    torch.testing.assert_close(compiled(*args, **kwargs), SCORES(*args, **kwargs))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tilewright.reset()
    with torch.no_grad():
        yield


def test_none_is_an_example_and_an_argument() -> None:
    compiled = tilewright.compile(SCORES, (None, X))
    before = tilewright.stats().graphs
    same(compiled, None, X)
    same(compiled, None, X + 1)
    assert tilewright.stats().graphs == before, "it was compiled for None"
    same(compiled, MASK, X)
    same(compiled, None, X, False)
    same(compiled, None, X)


def test_examples_by_name() -> None:
    compiled = tilewright.compile(SCORES, {"mask": None, "x": X, "scale": 3.0})
    before = tilewright.stats().graphs
    same(compiled, mask=None, x=X, scale=3.0)
    assert tilewright.stats().graphs == before
    same(compiled, None, X, scale=4.0)
    same(compiled, x=X, mask=MASK)


def test_none_beside_dynamic_dims() -> None:
    compiled = tilewright.compile(SCORES, (None, X), dims={"x": {0: "rows"}})
    before = tilewright.stats().graphs
    for rows in (4, 7, 30):
        same(compiled, None, torch.randn(rows, 8))
    assert tilewright.stats().graphs == before
    with pytest.raises(InputError, match="dims names 'mask', which is no tensor"):
        tilewright.compile(SCORES, (None, X), dims={"mask": {0: "rows"}})


def test_none_inside_other_arguments() -> None:
    def either(pair: tuple[Tensor, Tensor | None]) -> Tensor:
        first, second = pair
        return first * 2 if second is None else first + second

    compiled = tilewright.compile(either, ((X, None),))
    for pair in ((X, None), (X, MASK), (MASK, None)):
        torch.testing.assert_close(compiled(pair), either(pair))


def test_examples_that_do_not_fit() -> None:
    for examples in ((None,), {"mask": None, "y": X}):
        with pytest.raises(InputError, match="missing a required argument: 'x'"):
            tilewright.compile(SCORES, examples)


def test_what_an_exported_program_holds_cannot_be_another() -> None:
    plain = tilewright.compile(torch.export.export(SCORES, (None, X)), (None, X))
    same(plain, None, X)
    with pytest.raises(InputError, match="mask is a tensor .* exported for None"):
        plain(MASK, X)
    masked = torch.export.export(SCORES, (MASK, X, True, 3.0))
    compiled = tilewright.compile(masked)
    same(compiled, MASK, X, True, 3.0)
    for given in ((MASK, X, False, 3.0), (MASK, X, True, 2.0)):
        with pytest.raises(InputError, match="the program was exported for"):
            compiled(*given)
        with pytest.raises(InputError, match="the program was exported for"):
            tilewright.compile(masked, given)
    with pytest.raises(InputError, match="must be a tensor"):
        compiled(None, X, True, 3.0)


class Writing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(y)
        y[0] = 7
        self.count += 1
        return x * 2, y, y[1:] * 1, self.count


def test_a_written_argument_that_an_exported_program_returns_is_itself() -> None:
    program = torch.export.export(Writing(), (torch.randn(3, 4), torch.randn(3, 4)))
    compiled, module = tilewright.compile(program), program.module()
    for _ in range(2):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        x2, y2 = x.clone(), y.clone()
        ours, theirs = compiled(x, y), module(x2, y2)
        assert isinstance(ours, tuple) and ours[1] is y and theirs[1] is y2
        for a, b in zip((*ours[:3], x, y), (*theirs[:3], x2, y2), strict=True):
            torch.testing.assert_close(a, b)
    assert ours[3].data_ptr() == compiled(x, y)[3].data_ptr(), "the buffer itself"
