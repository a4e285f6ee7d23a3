"""Loops whose steps write into tensors: what that means for a scan, which writes nothing.

A tensor that steps write to and read again is a carried value in a memory of its own; behind the loop its last value is
written where the tensor lies. Parts that step after step writes, and no step reads, are stacked, and written behind the
loop at once. Both are right only if nothing else that the steps touch lies in the same memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, fx

from tilewright.capture.modes import MODES, SET_GRADIENTS, nodes_without_gradients
from tilewright.tuning.search_limits import REPEATS

from .leaving import memories_of, overlaps
from .nodes import val_of
from .taken.kinds import Lifted, Own, Picked, Sliced
from .unrolled import EqualSteps, Unlike


class Writes(Unlike):
    """Steps write into what stands at these keys of what they are given, at some of them unseen by autograd."""

    def __init__(self, keys: Collection[object], unseen: Collection[object], what: str) -> None:
        super().__init__(f"a step runs {what}")
        self.keys, self.unseen = keys, unseen


def owning(found: EqualSteps, writes: Writes) -> EqualSteps:
    """The steps, which carry the tensors that they write into in a memory of their own. Raises Unlike."""
    keys = writes.keys
    held = tuple(key for key in keys if isinstance(key, fx.Node) and key in found.outer)
    owned = frozenset(
        key[1] for key in keys if isinstance(key, tuple) and key[0] == "carried" and key[2] == 1
    )
    if len(held) + len(owned) < len(keys):
        raise Unlike("a step writes into a part of a tensor that it takes")
    unseen = frozenset(node for node in held if node in writes.unseen)
    return replace(found, held=held, owned=owned, unseen=unseen)


def reading_back(found: EqualSteps) -> EqualSteps:
    """The steps, where parts that a step reads are those that a step before has written: these are carried values. Or
    those that it writes itself, once they are read."""
    carried, sliced, back = dict(found.carried), dict(found.sliced), dict(found.read_back)
    first: set[fx.Node] = set()
    for written, store in found.stores.items():
        for m, node in enumerate(found.windows[1]):
            part = found.sliced.get(node)
            if part == store.part and all(_is_read_before(window, m, written) for window in found.windows):
                first.add(node)
                continue
            delay = _delay(store.part, part) if isinstance(part, Sliced) else 0
            if not delay or delay >= len(found.windows):
                continue
            firsts = {(written, delay - k): found.windows[k][m] for k in range(delay)}
            if any(key in found.carried for key in firsts):
                continue
            carried = firsts | carried
            back[node] = written, delay
            del sliced[node]
    return replace(found, carried=carried, sliced=sliced, read_back=back, read_first=frozenset(first))


def _is_read_before(window: Sequence[fx.Node], m: int, written: int) -> bool:
    """Whether the part that node m of a step takes is only read, by nodes in front of the one that writes there."""
    shown = _memories(window[m])
    readers = {n: k for k, n in enumerate(window[:written])}
    return all(u in readers and not shown & _memories(u) for u in window[m].users)


def _delay(written: Sliced, read: Sliced) -> int:
    """How many steps before the part that a step reads has been written; 0 if by none."""
    if replace(read, first=written.first) != written:
        return 0
    steps, rest = divmod(written.first - read.first, written.step)
    return steps if not rest and 0 < steps <= REPEATS.max_steps_back else 0


def check_writes(found: EqualSteps, stacked: Sequence[int], ends: Collection[int]) -> None:
    """Raise Unlike unless each tensor that the steps write to lies apart from everything else that they touch."""
    if not (found.stores or found.held or found.owned):
        return
    windows = found.windows
    _check_modes(found)
    begins = {m: first for (m, delay), first in found.carried.items() if delay == 1}
    if any(_memories(begins[m]) != _memories(windows[1][m]) for m in found.owned):
        raise Unlike("a step writes into what the step before made, and makes another tensor")
    spans = [_memories(n) for n in (*found.held, *(begins[m] for m in found.owned))]
    filled = [_memories(n) for n in {s.part.base: None for s in found.stores.values()}]
    if not all((*spans, *filled)):
        raise Unlike("a step writes into a tensor without memory")
    wholes = [
        val_of(n) for n in (*found.held, *begins.values(), *(s.part.base for s in found.stores.values()))
    ]
    if any(isinstance(t, Tensor) and overlaps(t) for t in wholes):
        raise Unlike("a step writes into a tensor that overlaps with itself")
    written = [m for memories in (*spans, *filled) for m in memories]
    parts = [s.part for s in found.stores.values()]
    apart = all(a.base is not b.base or _are_apart(a, b) for a, b in combinations(parts, 2))
    if len(written) > len(set(written)) or not apart:
        raise Unlike("a step writes twice into one memory")
    if any(set(written) & _memories(n) for n in _left_alone(found, stacked, ends)):
        raise Unlike("a step writes to memory that something else reads")
    if found.owned & {*stacked}:
        raise Unlike("what steps write into is read after each of them")
    _check_filled(found, {m for memories in filled for m in memories})


def _check_modes(found: EqualSteps) -> None:
    """Raise Unlike if steps write in a mode of their own, other than without gradients to what asks for none, or is not
    read again: the gradient of what is read there passes such a write by."""
    modes = {n.target for n in found.windows[1]} & {*MODES}
    if not modes:
        return
    wholes = [*found.held, *(first for (m, _), first in found.carried.items() if m in found.owned)]
    silent = nodes_without_gradients(found.windows[1][0].graph.nodes)
    back = {written for written, _ in found.read_back.values() if found.windows[1][written] in silent}
    wholes += [found.stores[written].part.base for written in back]
    asks = any(t.requires_grad for n in wholes if isinstance(t := val_of(n), Tensor))
    if asks or modes - {SET_GRADIENTS}:
        raise Unlike("a step writes in a mode of its own")


def _are_apart(a: Sliced, b: Sliced) -> bool:
    """Whether no step's part of one kind shares an element with any step's part of the other: beside the dim that
    counts, another number is taken of some dim; or of the dim that counts, places between those of the other."""
    if _base_dim(a) is not None and _base_dim(a) == _base_dim(b) and abs(a.step) == abs(b.step):
        behind = (b.first - a.first) % abs(a.step)
        if (a.length or 1) <= behind <= abs(a.step) - (b.length or 1):
            return True
    if a.index is None or b.index is None or a.dim != b.dim or len(a.index) != len(b.index):
        return False
    if None in a.index or None in b.index:
        return False  # numbers at one place may then be of two dims
    base = val_of(a.base)
    assert isinstance(base, Tensor)
    places = zip(_places(a.index, base), _places(b.index, base), strict=True)
    return any(
        x is not None and y is not None and (x.stop <= y.start or y.stop <= x.start) for x, y in places
    )


def _places(index: Sequence[object], base: Tensor) -> Iterator[range | None]:
    """Which places of each dim an index takes, from the first to the last; None where that is not known."""
    for x, size in zip(index, base.shape, strict=False):
        if type(size) is not int:
            yield range(x, x + 1) if type(x) is int and x >= 0 else None
        elif type(x) is int:
            yield range(x % size, x % size + 1)
        else:
            assert isinstance(x, slice)
            start, stop, step = x.indices(size)
            yield range(start, stop) if step > 0 else None


def _base_dim(part: Sliced) -> int | None:
    """The dim of the whole tensor along which the parts of steps lie; None if new dims hide it."""
    if part.index is None:
        return part.dim
    if None in part.index:
        return None
    slices = [p for p, x in enumerate(part.index) if type(x) is not int]
    return slices[part.dim]


def _left_alone(found: EqualSteps, stacked: Sequence[int], ends: Collection[int]) -> list[fx.Node]:
    """What steps take or leave without writing to it."""
    back = {w[m] for m, n in enumerate(found.windows[1]) if n in found.read_back for w in found.windows}
    carried = [x for (m, delay), x in found.carried.items() if m not in found.owned or delay > 1]
    made = [
        found.windows[1][m] for m in (*stacked, *ends, *(m for m, _ in found.carried)) if m not in found.owned
    ]
    outer = [n for n in found.outer if n not in found.held]
    return [*outer, *_bases(found), *(x for x in carried if x not in back), *made]


def _check_filled(found: EqualSteps, filled: set[int]) -> None:
    """Raise Unlike if a step reads this memory, which steps fill part by part, other than as a carried value, or if
    what it writes there is not of the part's shape: a stack of these would be broadcast along the steps."""
    back = {n for n in found.windows[1] if n in found.read_back or n in found.read_first}
    computed = [n for m, n in enumerate(found.windows[1]) if m not in found.stores and n not in back]
    for n in computed:
        shows = [i for i in n.all_input_nodes if filled & _memories(i)]
        if any(i not in back for i in shows):
            raise Unlike("a step reads what another one wrote")
        if shows and filled & _memories(n):
            back.add(n)  # it shows a part of a carried value
    for m, store in found.stores.items():
        made, base, index = val_of(store.value), val_of(store.part.base), found.windows[1][m].args[1]
        assert isinstance(base, Tensor)
        with torch.no_grad():
            part = base[index]  # pyright: ignore[reportArgumentType]
        if not isinstance(made, Tensor) or str(made.shape) != str(part.shape):
            raise Unlike("a step writes a value of another shape")


def _memories(node: fx.Node) -> set[int]:
    return set(memories_of(val_of(node)))


def _bases(found: EqualSteps) -> list[fx.Node]:
    """The tensors of which steps take parts, and what products in front of the loop read."""
    taken = [w for key, w in found.sliced.items() if key not in found.read_first]
    parts = [w.part if isinstance(w, Lifted) else w for w in taken]
    read = [n for w in found.sliced.values() if isinstance(w, Lifted) for n in w.node.all_input_nodes]
    owns = [n for p in parts if isinstance(p, Own) for n in p.nodes]
    return [*(p.base for p in parts if isinstance(p, (Sliced, Picked))), *owns, *read]
