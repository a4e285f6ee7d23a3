"""Random programs of the attention family, compiled every way, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.end_to_end.attention.family import Program, inputs, programs
from tests.support.fp64_rule import WAYS, Dims, built, wrong
from torch import Tensor

import tilewright

DRAWS = 4
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Programs are small as they are: each step of making them smaller would compile."""

FREE: Dims = {
    "q": {2: "queries"}, "k": {2: "keys"}, "v": {2: "keys"}, "query_ids": {0: "queries"},
    "key_ids": {0: "keys"}, "gates": {2: "queries"},
}  # fmt: skip
lengths = st.sampled_from([(19, 19), (8, 24), (33, 40), (17, 12)])
ways = st.sampled_from(WAYS)


def named(program: Program) -> Callable[..., object]:
    """The program as a function whose arguments have names."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, query_ids: Tensor, key_ids: Tensor, slopes: Tensor, sinks: Tensor,
        gates: Tensor, distances: Tensor,
    ) -> object:  # fmt: skip
        return program(q, k, v, query_ids, key_ids, slopes, sinks, gates, distances)

    return run


def check(program: Program, way: str, sizes: tuple[tuple[int, int], ...], dynamic: bool) -> None:
    """One compilation for all sizes; draws of each are judged together."""
    run = named(program)
    first = inputs(2, 4, 21, 26, 8) if dynamic else inputs(2, 4, *sizes[0], 8)
    compiled = built(run, first, way, FREE if dynamic else None)
    graphs = tilewright.stats().graphs
    for queries, keys in sizes:
        draws = [inputs(2, 4, queries, keys, 8) for _ in range(DRAWS)]
        text = wrong(run, compiled, draws, program.deciding if "any" in program.columns else None)
        assert not text, (queries, keys, text)
    assert tilewright.stats().graphs == graphs


@given(programs(), lengths, ways)
@settings(max_examples=6, phases=PHASES)
def test_any_program(program: Program, sizes: tuple[int, int], way: str) -> None:
    check(program, way, (sizes,), False)


@given(programs(), ways)
@settings(max_examples=4, phases=PHASES)
def test_any_program_of_any_length(program: Program, way: str) -> None:
    check(program, way, ((19, 19), (8, 24), (33, 40)), True)


def test_scores_that_a_later_pass_finds_in_scratch() -> None:
    """Where the mask is known to let them through, they are stored like the others."""
    program = Program(("scale", "cap", "slope"), "sink", "masked_fill", "softmax", (), ("sum",))
    check(program, "library", ((19, 19),), False)


def test_a_mask_from_ids_that_are_loaded_beside_it() -> None:
    """Whether an access is turned is asked before what its mask reads has been printed."""
    check(
        Program(("slope", "distance", "gate"), "documents", "where", "relu", ("max",), ()),
        "inside",
        ((8, 24),),
        False,
    )


@pytest.mark.slow
@given(programs(), lengths, ways, st.booleans())
@settings(max_examples=150, phases=PHASES)
def test_many_programs(program: Program, sizes: tuple[int, int], way: str, dynamic: bool) -> None:
    check(program, way, (sizes,), dynamic)
