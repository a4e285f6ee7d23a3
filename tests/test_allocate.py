"""Packing never overlaps what is alive together, and wastes little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.allocate import Block, _best_gap, pack, peak

blocks = st.lists(
    st.builds(
        lambda size, start, length: Block(size, start, start + length),
        st.integers(0, 300),
        st.integers(0, 12),
        st.integers(0, 6),
    ),
    max_size=25,
)


@given(blocks, st.sampled_from([1, 8, 64]))
def test_never_overlap_while_alive(given_blocks: list[Block], align: int) -> None:
    offsets, total = pack(given_blocks, align)
    assert (offsets, total) == pack(given_blocks, align)
    assert total % align == 0 and all(offset % align == 0 for offset in offsets)
    placed = list(zip(offsets, given_blocks, strict=True))
    for i, (a, x) in enumerate(placed):
        assert a + x.size <= total or not x.size or x.start == x.end
        for b, y in placed[:i]:
            if x.meets(y) and x.size and y.size:
                assert a + x.size <= b or b + y.size <= a
    assert peak(given_blocks) <= total or not given_blocks


def test_a_chain_needs_two_buffers() -> None:
    chain = [Block(100, step, step + 2) for step in range(20)]
    offsets, total = pack(chain, 1)
    assert total == 200 == peak(chain) and set(offsets) == {0, 100}


def test_the_smallest_gap_is_taken() -> None:
    assert _best_gap([(40, 50), (70, 90), (90, 100)], 20) == 50
    assert _best_gap([(40, 50), (70, 90), (90, 100)], 21) == 0
    assert _best_gap([(40, 50), (70, 90), (90, 100)], 41) == 100
    assert _best_gap([(0, 60), (10, 20), (80, 90)], 5) == 60, "taken intervals may overlap each other"


def test_wrong_use() -> None:
    assert pack([]) == ((), 0)
    with pytest.raises(ValueError):
        pack([Block(1, 0, 1)], 0)
    with pytest.raises(ValueError):
        Block(1, 2, 1)
