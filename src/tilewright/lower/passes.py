"""Pass numbers: which loops over one class there are, and which folds and outputs each of them serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilewright.form.companions import Merge, follow
from tilewright.ir.expr import Axis
from tilewright.ir.form import Item, folds_read

Numbers = dict[int, int]
Merges = dict[int, Merge]


def pass_numbers(
    cone: Sequence[Item], outputs: Sequence[Item], c: Axis, folds: Mapping[int, Item] | None = None,
    together: Collection[Axis] = (),
) -> tuple[Numbers, Merges]:  # fmt: skip
    """Pass number along `c` of each item of `cone` (producers first) and of `outputs`; and how folds run in the pass of
    the folds that they read, where the online law lets them (among `folds`, None = nowhere). Of the classes `together`
    each step has all values.

    A reader stands one pass after a fold over `c` that it reads; beside a scan that it reads at the same index, which a
    fold over `c` does in each of its elements."""
    apart: set[int] = set()
    while True:
        numbers, merges = _numbered(cone, outputs, c, folds, apart, together)
        steps = {i: {numbers.get(f, numbers[i]) for f in m.beside} for i, m in merges.items()}
        late = next((i for i, found in steps.items() if found - {numbers[i]}), None)
        if late is None:
            return numbers, merges
        apart.add(late)


def _numbered(
    cone: Sequence[Item], outputs: Sequence[Item], c: Axis, folds: Mapping[int, Item] | None,
    apart: Collection[int], together: Collection[Axis],
) -> tuple[Numbers, Merges]:  # fmt: skip
    numbers: Numbers = {}
    merges: Merges = {}
    inside = {i.id: i for i in cone}
    for i in (*cone, *outputs):
        number, waits = 0, []
        for d in folds_read(i.roots):
            up = inside.get(d)
            if up is None:
                continue
            late = c in up.reduce or (up.scan == c and c not in i.axes)
            number = max(number, numbers[d] + late)
            waits += [d] if late else []
        alone = [a for a in i.reduce if a not in together] == [c]
        if folds is not None and waits and i.id not in apart and alone:
            merge = follow(i, [inside[d] for d in waits if numbers[d] + 1 == number], folds)
            if merge is not None:
                merges[i.id] = merge
                number -= 1
        numbers[i.id] = number
    return numbers, merges


def moving_folds(merges: Merges) -> set[int]:
    """Folds whose new values others need within the step."""
    counts = {m.count for m in merges.values() if m.count is not None}
    return {g for m in merges.values() for g in m.statistics} | counts
