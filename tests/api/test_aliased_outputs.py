"""Outputs that show a part of an input, of another output or of what was written: torch makes them anew from where they
lie, so they must lie where the program put them, at sizes that are not known when compiling too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PROGRAMS: dict[str, Callable[[Tensor], object]] = {
    "half": lambda x: x[x.shape[0] // 2 :],
    "half and more": lambda x: (x[x.shape[0] // 2 :], x + 1),
    "chunks": lambda x: x.chunk(2, 0),
    "columns": lambda x: x.t()[x.shape[1] // 2 :],
    "grid": lambda x: torch.meshgrid(x[:, 0], x[:, 1], indexing="ij"),
    "flat": lambda x: x.reshape(x.shape[0] * x.shape[1])[x.shape[1] :],
    "of an output": lambda x: (lambda z: (z[z.shape[0] // 2 :], z))(x * 2),
    "two parts of a result": lambda x: (x * 2).chunk(2, 0),
    "of a copy": lambda x: (lambda c: (c[c.shape[0] // 2 :], c))(x.clone()),
    "of what was written": lambda x: (x.add_(1), x[x.shape[0] // 2 :])[1],
}


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_lie_where_the_program_put_them(name: str, gradient: bool) -> None:
    if gradient and name == "of what was written":
        pytest.skip("eager refuses to write into a leaf")
    torch._dynamo.reset()
    program = PROGRAMS[name]
    compiled = torch.compile(lambda x: program(x), backend="tilewright", dynamic=True)
    for rows in (8, 12):
        base, first = (
            torch.randn(rows + 1, 6),
            name != "of what was written",
        )  # torch forgets where that began
        ours, theirs = (base.clone()[first:].requires_grad_(gradient) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            got, want = tree_leaves(compiled(ours)), tree_leaves(program(theirs))
        for y, e in zip(got, want, strict=True):
            assert torch.equal(y, e) and y.stride() == e.stride()
            assert _inside(y, ours) == _inside(e, theirs)


def _inside(y: Tensor, x: Tensor) -> bool:
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
