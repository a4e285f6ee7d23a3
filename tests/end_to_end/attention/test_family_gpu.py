"""Random programs of the attention family as kernels for a GPU, run by the interpreter: few queries, and many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.end_to_end.attention.family import Program, inputs, programs
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright import accuracy

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
few = st.tuples(st.sampled_from([1, 2, 3, 16]), st.sampled_from([600, 1025, 2048]))
many = st.sampled_from([1, 2, 17, 127, 129]).map(lambda n: (n, n))


def check(program: Program, queries: int, keys: int, launch: float = 1e-6) -> None:
    function: Callable[..., tuple[Tensor, ...]] = program
    given = list(inputs(1, 4, queries, keys, 16))
    made = compiled(function, given, launch=launch)
    results, _ = made.run(given)
    with torch.no_grad():
        eager, exact = function(*given), accuracy.in_float64(function)(*given)
    for ours, e, r in zip(results, eager, exact, strict=True):
        if e.dtype is torch.bool:
            near = (program.deciding(*given).double().abs() < 1e-5).reshape(e.shape)
            assert not ((ours != e) & ~near).any(), program
        else:
            # Few elements say little about the worst of them: the bound is what eager needs, or a few roundings.
            where = torch.isfinite(r)
            assert (torch.isfinite(ours) == torch.isfinite(e)).all(), program
            far = ((ours - r).abs() / (r.abs() + r[where].abs().mean().nan_to_num(1.0)))[where]
            own = ((e - r).abs() / (r.abs() + r[where].abs().mean().nan_to_num(1.0)))[where]
            assert far.numel() == 0 or far.max() <= 4 * own.max() + 4e-6, (
                program,
                float(far.max()),
                float(own.max()),
            )


@given(programs(), few)
@settings(max_examples=2, phases=PHASES, deadline=None)
def test_few_queries(program: Program, lengths: tuple[int, int]) -> None:
    check(program, *lengths, launch=0.0)


@given(programs(), many)
@settings(max_examples=5, phases=PHASES, deadline=None)
def test_many_queries(program: Program, lengths: tuple[int, int]) -> None:
    check(program, *lengths)


@pytest.mark.slow
@given(programs(), st.one_of(few, many, st.just((1000, 1000)), st.just((3, 4097))))
@settings(max_examples=20, phases=PHASES, deadline=None)
def test_more(program: Program, lengths: tuple[int, int]) -> None:
    check(program, *lengths, launch=0.0)
