"""Where a captured graph repeats itself: steps of a loop that was written in Python, found by their keys alone.

Each node has a key: what it calls, how its arguments are nested, the inputs among them, and the type of its result. A
loop of equal steps is a stretch of keys with a period. Candidates for the period are the distances at which short
pieces of keys come again, so that the search takes time proportional to the graph. What stretches really compute is
looked at by `rolled`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from tilewright.tuning.search_limits import REPEATS

from .nodes import arguments_of


@dataclass(frozen=True, slots=True)
class Repeat:
    """`steps` times `period` nodes from number `start` on have the same keys, step by step. More than `most` steps are
    worth a loop. Each is `cycle` steps of the program."""

    start: int
    period: int
    steps: int
    most: int = 0
    cycle: int = 1

    def joined(self, cycle: int) -> Repeat:
        """The same with so many steps as one."""
        return Repeat(self.start, self.period * cycle, self.steps // cycle, self.most // cycle, cycle)


def repeats(nodes: Sequence[fx.Node], most: int, *, named: bool = True, sized: bool = True) -> list[Repeat]:
    """Stretches of `nodes` with more than `most` steps, or that have as many together (see `_worth_a_loop`), those that
    cover the most nodes first, each at its most promising phases. Unless `named`, steps that read different inputs at
    one place are alike; unless `sized`, those are too that make tensors of other sizes."""
    ids: dict[object, int] = {}
    keys = [ids.setdefault(_key(n, named=named, sized=sized), len(ids)) for n in nodes]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for period in _periods(keys, most):
        for stretch, end, least in _worth_a_loop(keys, period, most):
            start = _begun(nodes, stretch, period)
            known = found.setdefault((start, end), (period, least))
            found[start, end] = min(known, (period, least))
    order = sorted(found.items(), key=lambda f: f[0][0] - f[0][1])
    return [r for (start, end), (period, least) in order for r in _phased(nodes, start, end, period, least)]


def _worth_a_loop(keys: Sequence[int], period: int, most: int) -> list[tuple[int, int, int]]:
    """The stretches of this period that are long enough, each with the most steps that are not. Where something else is
    done after each so many steps (`h = h.detach()`), the parts of what would be one stretch count together."""
    groups: list[list[tuple[int, int]]] = []
    for start, end in _stretches(keys, period):
        if (end - start) // period <= min(most, REPEATS.min_part_steps - 1):
            continue
        before = groups[-1][-1] if groups else None
        alike = (
            before is not None
            and start - before[1] <= period
            and sorted(keys[start : start + period]) == sorted(keys[before[0] : before[0] + period])
        )
        if alike:
            groups[-1].append((start, end))
        else:
            groups.append([(start, end)])
    found: list[tuple[int, int, int]] = []
    for group in groups:
        if len(group) > 1 and sum((end - start) // period for start, end in group) > most:
            found += [(*part, min(most, REPEATS.min_part_steps - 1)) for part in group]
        else:
            found += [(*part, most) for part in group if (part[1] - part[0]) // period > most]
    return found


def _key(node: fx.Node, *, named: bool, sized: bool = True) -> object:
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op, node.name
    return (
        node.op, node.target if isinstance(node.target, str) else id(node.target), _nesting(node.args, named=named),
        _nesting(node.kwargs, named=named), _type(node.meta.get("example_value"), sized=sized),
    )  # fmt: skip


def _nesting(a: object, *, named: bool) -> object:
    """Arguments without the numbers and the computed nodes in them. Inputs (weights) mostly are the same in every
    step: they are `named`."""
    nesting = partial(_nesting, named=named)
    if isinstance(a, fx.Node):
        return a.name if named and a.op in ("placeholder", "get_attr") else fx.Node
    if isinstance(a, (list, tuple)):
        return type(a).__name__, tuple(map(nesting, a))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(a, dict):
        return tuple((k, nesting(v)) for k, v in a.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(a, slice):
        return slice, nesting(a.start), nesting(a.stop), nesting(a.step)
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return type(a)
    return repr(a)


def _begun(nodes: Sequence[fx.Node], start: int, period: int) -> int:
    """Where a stretch begins, up to one period before `start`. The first step of a loop reads an input of the program
    where later ones read what the step before made: by their keys its nodes differ from those of the others."""
    begin = start
    while begin > max(0, start - period) and _begins(nodes[begin - 1], nodes[begin - 1 + period]):
        begin -= 1
    return begin


def _begins(first: fx.Node, later: fx.Node) -> bool:
    """Whether two nodes are alike but for inputs of the first one in the place of computed nodes."""
    if _key(first, named=False) != _key(later, named=False):
        return False
    pairs = zip(arguments_of(first), arguments_of(later), strict=True)
    return all(a is b for a, b in pairs if isinstance(b, fx.Node) and b.op in ("placeholder", "get_attr"))


def _type(val: object, *, sized: bool) -> object:
    if isinstance(val, Tensor):
        return tuple(map(str, val.shape)) if sized else val.dim(), val.dtype, str(val.device)
    if isinstance(val, (list, tuple)):
        return tuple(_type(x, sized=sized) for x in val)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(val) if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) else type(val)


def _periods(keys: Sequence[int], most: int) -> list[int]:
    counts: Counter[int] = Counter()
    for length in REPEATS.piece_lengths:
        last: dict[tuple[int, ...], int] = {}
        for k in range(len(keys) - length + 1):
            piece = tuple(keys[k : k + length])
            if piece in last:
                counts[k - last[piece]] += 1
            last[piece] = k
    return [
        p for p, count in counts.most_common(REPEATS.max_periods) if count >= most and p * most < len(keys)
    ]


def _stretches(keys: Sequence[int], period: int) -> list[tuple[int, int]]:
    """First and last-but-one places of the longest stretches of this period."""
    found: list[tuple[int, int]] = []
    start = 0
    for k in range(len(keys) - period + 1):
        if k == len(keys) - period or keys[k] != keys[k + period]:
            if k > start:
                found.append((start, k + period))
            start = k + 1
    return found


def _phased(nodes: Sequence[fx.Node], start: int, end: int, period: int, most: int) -> list[Repeat]:
    """The steps of a stretch, begun at the places where the fewest values pass from one step to the next, and those
    are tensors."""
    where = {n: k for k, n in enumerate(nodes[start:end])}
    middle = (end - start) // period // 2 * period
    passing = [0] * (period + 1)
    for k in range(max(0, middle - period), min(middle + period, end - start)):
        last = max((where[u] for u in nodes[start + k].users if u in where), default=k)
        weight = 1 if isinstance(nodes[start + k].meta.get("example_value"), Tensor) else period
        for cut in range(max(k + 1, middle), min(last, middle + period) + 1):
            passing[cut - middle] += weight
    order = sorted(range(period), key=lambda phase: (passing[phase], phase))[: REPEATS.max_phases]
    cut = [Repeat(start + p, period, (end - start - p) // period, most) for p in order]
    return [r for r in cut if r.steps > most]
