"""What equal steps of a captured graph read and make: whether they are one loop, and which."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, torch.add, torch.sub, torch.mul,
    torch.div, torch.pow,
}  # fmt: skip
"""What a number and a tensor without dims mean the same to."""


def val_of(node: fx.Node) -> object:
    """What stands for the value of a node while torch captures."""
    return node.meta.get("example_value")


@dataclass(frozen=True, slots=True)
class Sliced:
    """What step k reads of `base`: the part number `first` + k * `step` along a dim."""

    base: fx.Node
    index: tuple[object, ...] | None
    """Of `base[index]`, with a full slice in the place of the number; None: `dim` is counted in `base` itself."""
    dim: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """What step k reads is number k of these."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Lifted:
    """What step k reads is part number k of a product of all that step k takes of `part`: of what `node`, of step 1, is
    one of."""

    part: Sliced
    node: fx.Node


@dataclass(slots=True)
class Steps:
    """Equal steps: `windows[k]` are the nodes of step k, `kept` those numbers of a step that are computed in it."""

    windows: list[list[fx.Node]]
    carried: dict[tuple[int, fx.Node], None] = field(default_factory=dict[tuple[int, fx.Node], None])
    """Carried values: the number of the node that makes them, and what stands for it before the first step."""
    sliced: dict[object, Sliced | Numbers | Lifted] = field(
        default_factory=dict[object, Sliced | Numbers | Lifted]
    )
    """By what stands for them in step 1: a node, or number of a node and of its argument."""
    outer: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    unread: frozenset[object] = frozenset()
    """What is sliced and read only by products that are sliced themselves."""

    @property
    def taken(self) -> dict[object, Sliced | Numbers | Lifted]:
        """What a step takes of what is sliced."""
        return {key: what for key, what in self.sliced.items() if key not in self.unread}

    @property
    def steps(self) -> int:
        """Their number."""
        return len(self.windows)


class Unlike(Exception):
    """The steps are no loop that can be written as one."""


def runs(windows: Sequence[Sequence[fx.Node]]) -> list[tuple[int, int]]:
    """Runs of steps whose arguments come from the same places of the step and the step before, or from outside, where
    the same ones differ from the step before; longest first."""
    where = {n: (k, m) for k, window in enumerate(windows) for m, n in enumerate(window)}

    def sources(k: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for n, before in zip(windows[k], windows[k - 1], strict=True):
            for a, b in zip(arguments_of(n), arguments_of(before), strict=True):
                at = where.get(a, (-1, 0)) if isinstance(a, fx.Node) else (-1, 0)
                back = k - at[0]
                differs = isinstance(a, fx.Node) and a is not b
                found.append((back, at[1]) if back in (0, 1) else (-1, differs))
        return found

    runs: list[tuple[int, int]] = []
    start, usual = 0, sources(1)
    for k in range(1, len(windows)):
        now = sources(k)
        if k == start + 1:
            usual = now
        elif now != usual:
            runs.append((start, k))
            start = k
    runs.append((start, len(windows)))
    return sorted(runs, key=lambda r: r[0] - r[1])


def arguments_of(node: fx.Node) -> list[object]:
    """All nodes and plain values among the arguments, in order."""
    found: list[object] = []

    def visit(a: object) -> None:
        if isinstance(a, (list, tuple)):
            for x in a:  # pyright: ignore[reportUnknownVariableType]
                visit(x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(a, dict):
            for x in a.values():  # pyright: ignore[reportUnknownVariableType]
                visit(x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(a, slice):
            for x in (a.start, a.stop, a.step):
                visit(x)
        else:
            found.append(a)

    visit(node.args)
    visit(node.kwargs)
    return found


def classified(windows: list[list[fx.Node]]) -> Steps:
    """The steps with what they read. Raises Unlike."""
    made = Steps(windows)
    where = [{n: m for m, n in enumerate(window)} for window in windows]
    for m, node in enumerate(windows[1]):
        sliced = _sliced([window[m] for window in windows], where)
        if sliced is not None:
            made.sliced[node] = sliced
            continue
        for p, across in enumerate(zip(*(arguments_of(window[m]) for window in windows), strict=True)):
            _read(made, where, (m, p), across)
    if not made.carried:
        raise Unlike("no step reads what another one made")
    return made


def _read(
    made: Steps, where: Sequence[dict[fx.Node, int]], at: tuple[int, int], across: Sequence[object]
) -> None:
    """Note where argument `at` (number of a node, and of its argument) comes from, which is across[k] in step k."""
    first, second = across[0], across[1]
    if not isinstance(second, fx.Node):
        if any(type(a) is not type(second) or a != second for a in across):
            node = made.windows[1][at[0]]
            if node.target not in _ARITHMETIC or not all(type(a) in (int, float) for a in across):
                raise Unlike(f"an argument of {node.target} differs from step to step")
            made.sliced[at] = Numbers(cast(tuple[float, ...], tuple(across)))
        return
    if second in where[1]:
        if any(a not in where[k] or where[k][a] != where[1][second] for k, a in enumerate(across)):  # pyright: ignore[reportArgumentType]
            raise Unlike("the first step is wired in another way")
    elif second in where[0]:
        if not isinstance(first, fx.Node):
            raise Unlike("the first step reads a number where others read a tensor")
        made.carried[where[0][second], first] = None
    elif all(a is second for a in across):
        made.outer[second] = None
    else:
        outside = [a for a in across if isinstance(a, fx.Node)]
        sliced = _sliced(outside, [{}] * len(outside)) if len(outside) == len(across) else None
        if sliced is None:
            raise Unlike("each step reads a tensor of its own")
        made.sliced[second] = sliced


def _sliced(nodes: Sequence[fx.Node], where: Sequence[dict[fx.Node, int]]) -> Sliced | None:
    """What one tensor's parts are that these nodes take, part after part."""
    first, base = nodes[0], nodes[0].args[0] if nodes[0].args else None
    if not isinstance(base, fx.Node) or any(n.target != first.target or n.kwargs for n in nodes):
        return None
    if any(len(n.args) != len(first.args) or n.args[0] is not base for n in nodes):
        return None
    if any(base in inside for inside in where):
        return None
    val = val_of(base)
    if first.target is operator.getitem:
        if isinstance(val, Tensor):
            return _indexed(base, val, [n.args[1] for n in nodes])
        source = base.args[0] if base.args else None
        unbound = base.target in (torch.unbind, "unbind") and isinstance(source, fx.Node)
        if not unbound or not isinstance(whole := val_of(cast(fx.Node, source)), Tensor):
            return None
        dim = base.args[1] if len(base.args) > 1 else base.kwargs.get("dim", 0)
        return _counted(cast(fx.Node, source), None, cast(int, dim), whole, [n.args[1] for n in nodes])
    if first.target in (torch.select, "select") and len(first.args) == 3 and isinstance(val, Tensor):
        dim = first.args[1]
        if isinstance(dim, int) and all(n.args[1] == dim for n in nodes):
            return _counted(base, None, dim, val, [n.args[2] for n in nodes])
    return None


def _indexed(base: fx.Node, val: Tensor, indices: Sequence[object]) -> Sliced | None:
    """`base[index]` with one number, or one part of length one, that counts among slices, numbers and new dims that
    stay."""
    rows = [_spelled(i if isinstance(i, tuple) else (i,), val.dim()) for i in indices]
    first = rows[0]
    counting = [p for p in range(len(first)) if any(r[p] != first[p] for r in rows if len(r) == len(first))]
    if len(counting) != 1 or any(len(r) != len(first) for r in rows):
        return None
    (place,) = counting
    numbers = [_number_of(r[place]) for r in rows]
    others = (*first[:place], *first[place + 1 :])
    if not all(x is None or type(x) is int or _is_plain(x) for x in others):
        return None
    dim = sum(type(x) is not int for x in first[:place])
    index = (
        *first[:place],
        slice(None),
        *((None,) if isinstance(first[place], slice) else ()),
        *first[place + 1 :],
    )
    size_dim = sum(x is not None for x in first[:place])
    return _counted(base, None if all(map(_is_full, index)) else index, dim, val, numbers, size_dim=size_dim)


def _spelled(row: tuple[object, ...], dims: int) -> tuple[object, ...]:
    """An index with full slices in the place of an ellipsis."""
    at = next((p for p, x in enumerate(row) if x is Ellipsis), None)
    if at is None:
        return row
    left = dims - sum(x is not None and x is not Ellipsis for x in row)
    return (*row[:at], *(slice(None) for _ in range(left)), *row[at + 1 :])


def _number_of(x: object) -> object:
    """The number that an index takes, also as a part of length one; None for others."""
    if isinstance(x, slice) and type(x.start) is int and type(x.stop) is int and x.step in (None, 1):
        return x.start if x.stop == x.start + 1 and x.stop != 0 else None
    return x


def _is_plain(x: object) -> bool:
    return isinstance(x, slice) and all(n is None or type(n) is int for n in (x.start, x.stop, x.step))


def _is_full(x: object) -> bool:
    return isinstance(x, slice) and x == slice(None)


def _counted(
    base: fx.Node, index: tuple[object, ...] | None, dim: int, val: Tensor, numbers: Sequence[object],
    *, size_dim: int | None = None,
) -> Sliced | None:  # fmt: skip
    """The parts with these numbers, if they count up or down by one."""
    size = cast(object, val.shape[dim if size_dim is None else size_dim])
    if any(type(n) is not int for n in numbers):
        return None
    known = cast(list[int], list(numbers))
    if known[0] < 0:
        if not isinstance(size, int):
            return None
        known = [n + size for n in known]
    step = known[1] - known[0]
    if step not in (1, -1) or known != list(range(known[0], known[0] + step * len(known), step)):
        return None
    outside = (
        isinstance(size, int) and max(known) >= size
    )  # a part behind the end is empty, where a number raises
    return Sliced(base, index, dim, known[0], step) if min(known) >= 0 and not outside else None
