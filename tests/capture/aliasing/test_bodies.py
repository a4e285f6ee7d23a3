"""Dropout that drops nothing is its operand: a write into one is in the other. Branches may still end with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilewright
from tilewright.capture.aten import mended_ops
from tilewright.errors import UnsupportedError

Program = Callable[[Tensor], Any]


class Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> object:
        return self.program(x)


def through_dynamo(program: Program, _: Tensor) -> Program:
    return torch.compile(program, backend="tilewright")


def through_export(program: Program, x: Tensor) -> Program:
    return tilewright.compile(torch.export.export(Module(program), (x,)))


def written(x: Tensor) -> Tensor:
    y = x * 2
    F.dropout(y, 0.5, training=False).add_(1)
    return y * 1


def operand_written(x: Tensor) -> Tensor:
    y = x * 2
    z = F.dropout(y, 0.0)
    y.mul_(3)
    return z * 1


def input_written(x: Tensor) -> Tensor:
    nn.Dropout().eval()(x).add_(1)
    return x * 3


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(written, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


def left_by_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda q: F.dropout(q, 0.5, training=False), lambda q: q.sin(), (x,))


def written_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, written, lambda q: q.sin(), (x,))


@pytest.mark.parametrize("entry", [through_dynamo, through_export])
@pytest.mark.parametrize("program", [written, operand_written, input_written, checkpointed, left_by_a_branch])
def test_dropout_that_drops_nothing_is_its_operand(
    program: Program, entry: Callable[[Program, Tensor], Program]
) -> None:
    given, x = torch.ones(2, 3), torch.ones(2, 3)
    fast = entry(program, torch.ones(2, 3))
    torch.testing.assert_close(fast(given), program(x))
    torch.testing.assert_close(given, x)


def written_in_place_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0, lambda q: F.dropout(q * 2, 0.5, False, inplace=True).mul_(2), written, (x,)
    )


def input_written_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, input_written, lambda q: q.sin(), (x,))


@pytest.mark.parametrize("entry", [through_dynamo, through_export])
@pytest.mark.parametrize("program", [written_in_a_branch, written_in_place_in_a_branch])
def test_dropout_that_is_written_to_in_a_branch(
    program: Program, entry: Callable[[Program, Tensor], Program]
) -> None:
    fast = entry(program, torch.ones(2, 3))
    for start in (1.0, -1.0):
        given, x = torch.full((2, 3), start), torch.full((2, 3), start)
        torch.testing.assert_close(fast(given), program(x))
        torch.testing.assert_close(given, x)


def test_a_branch_that_writes_into_its_input_through_dropout() -> None:
    """Torch's own tracing takes it for a copy, and so does not refuse the program."""
    given, x = torch.ones(2, 3), torch.ones(2, 3)
    fast = through_dynamo(input_written_in_a_branch, x)
    torch.testing.assert_close(fast(given), input_written_in_a_branch(x))
    torch.testing.assert_close(given, x)
    with pytest.raises(UnsupportedError, match="cannot make this program functional"):
        through_export(input_written_in_a_branch, x)


def test_the_program_that_is_compiled_stays_as_it_was() -> None:
    program = torch.export.export(Module(written_in_a_branch), (torch.ones(2, 3),))
    before = str(program.graph_module.true_graph_0.graph)  # type: ignore[union-attr]
    tilewright.compile(program)
    assert str(program.graph_module.true_graph_0.graph) == before  # type: ignore[union-attr]


def test_results_are_one_tensor_where_they_are_in_eager_mode() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, F.dropout(y, 0.5, training=False)

    y, z = torch.compile(program, backend="tilewright")(torch.ones(3))
    assert y is z


def test_torch_has_its_own_dropout_again_behind_two_that_overlap() -> None:
    """As two threads enter and leave."""
    kernels = torch.ops.aten.dropout.default.py_kernels
    before = dict(kernels)
    first, second = mended_ops(), mended_ops()
    first.__enter__()
    second.__enter__()
    assert kernels != before
    first.__exit__(None, None, None)
    assert kernels != before, "the other one still traces"
    second.__exit__(None, None, None)
    assert kernels == before
