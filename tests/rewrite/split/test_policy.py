"""One way to cut an axis, and one policy for the number of parts."""

from __future__ import annotations

import math

import pytest

from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.rewrite.split.parts import Cut
from tilewright.rewrite.split.policy import fastest, part_counts, seconds_of

KERNEL = Kernel((), (Value(0, (dims.integer(4),), f32),))


@pytest.mark.parametrize(("extent", "count", "multiple"), [(12, 4, 1), (13, 4, 1), (100, 8, 16), (3, 8, 1)])
def test_each_element_has_one_place(extent: int, count: int, multiple: int) -> None:
    cut = Cut.into(Axis("r", dims.integer(extent)), count, multiple)
    assert cut.part is not None and cut.element is not None
    length = dims.evaluate(cut.length, {})
    found: list[int] = []
    counted = 0
    for p in range(count):
        at_part = {axis(cut.part): dims.integer(p)}
        for q in range(length):
            at = at_part | {axis(cut.element): dims.integer(q)}
            place = dims.evaluate(substitute(cut.place, at), {})
            if cut.inside is None or place < extent:
                found.append(place)
        counted += max(0, dims.evaluate(substitute(cut.count, at_part), {}))
    assert found == list(range(extent)) and counted == extent
    assert length % multiple == 0
    assert (cut.inside is None) == (length * count == extent)


def test_one_part_needs_no_number() -> None:
    whole = Axis("r", dims.integer(7))
    cut = Cut(whole, None, Axis("q", whole.extent), whole.extent)
    assert cut.place is axis(Axis("q", whole.extent)) and cut.inside is None and cut.count is whole.extent


def test_parts_have_enough_elements() -> None:
    assert part_counts((4, 16, 64), 1024, 64) == [4, 16]
    assert part_counts((4, 16, 64), 64, 64) == []


def test_the_first_of_the_fastest_is_taken_if_it_beats_the_whole() -> None:
    ways = [("a", 3.0), ("b", 2.0), ("c", 2.0), ("d", math.inf)]
    assert fastest(ways, 4.0) == "b"
    assert fastest(ways, 2.0) is None and fastest([], math.inf) is None


def test_what_has_no_legal_form_is_never_fastest() -> None:
    def refused(kernel: Kernel, layouts: object) -> float:
        raise IllegalSchedule("no form", law="none", phase="schedule")

    assert seconds_of([KERNEL], {}, refused) == math.inf
    assert seconds_of([KERNEL, KERNEL], {}, lambda k, layouts: 1.5) == 3.0
