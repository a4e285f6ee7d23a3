"""Parts of one tensor that equal nodes of steps take."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx

from tilewright.capture.loops.nodes import arguments_of, val_of

from .kinds import Picked, Sliced

TAKES = (
    operator.getitem, torch.unbind, "unbind", torch.select, "select", torch.narrow, "narrow", torch.split, "split",
    torch.chunk, "chunk",
)  # fmt: skip
"""What takes parts of a tensor, and nothing else."""


def picks(node: fx.Node, place: int) -> bool:
    """Whether an argument is the number of what a node takes of a tensor."""
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or not isinstance(val_of(base), Tensor) or node.kwargs:
        return False
    if node.target in (torch.select, "select"):
        return place == 2
    if node.target is not operator.getitem or not is_basic_index(node.args[1]):
        return False
    row = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(not isinstance(x, slice) or is_full_slice(x) for x in row) and any(type(x) is int for x in row)


def sliced(nodes: Sequence[fx.Node], where: Sequence[dict[fx.Node, int]]) -> Sliced | None:
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
            return indexed(base, val, [n.args[1] for n in nodes])
        return _piece(base, [n.args[1] for n in nodes])
    if len(first.args) < 3 or not isinstance(val, Tensor):
        return None
    given = [cast(tuple[int, ...], tuple(n.args[1:])) for n in nodes]
    if any(type(a) is not int for of in given for a in of) or len({of[0] for of in given}) != 1:
        return None
    dim, numbers = given[0][0], [of[1:] for of in given]
    if first.target in (torch.select, "select") and len(first.args) == 3:
        return _counted(base, None, dim, val, [n for (n,) in numbers])
    if first.target in (torch.narrow, "narrow") and len(first.args) == 4:
        if len({length for _, length in numbers}) == 1:
            return _counted(base, None, dim, val, [n for n, _ in numbers], length=numbers[0][1])
    return None


def picked(nodes: Sequence[fx.Node], where: Sequence[dict[fx.Node, int]]) -> Picked | None:
    """What one tensor's parts are that these nodes take, at places in any order: copied at each call."""
    first, base = nodes[0], nodes[0].args[0] if nodes[0].args else None
    if not isinstance(base, fx.Node) or any(n.args[0] is not base or n.target != first.target for n in nodes):
        return None
    tensor, one = val_of(base), val_of(first)
    if (
        any(base in inside for inside in where)
        or not isinstance(tensor, Tensor)
        or not isinstance(one, Tensor)
    ):
        return None
    rows = [_row(n, tensor.dim()) for n in nodes]
    row = rows[0]
    if row is None or any(r is None or len(r) != len(row) for r in rows):
        return None
    known = cast(list[tuple[object, ...]], rows)
    differ = [
        p for p in range(len(row)) if any(type(r[p]) is not type(row[p]) or r[p] != row[p] for r in known)
    ]
    if len(differ) != 1 or type(row[differ[0]]) is not int:
        return None
    (place,) = differ
    size = cast(object, tensor.shape[sum(x is not None for x in row[:place])])
    places = cast(list[int], [r[place] for r in known])
    if type(size) is not int or not all(type(n) is int and -size <= n < size for n in places):
        return None
    index = (*row[:place], slice(None), *row[place + 1 :])
    dim = sum(type(x) is not int for x in row[:place])
    return Picked(
        base, None if all(map(is_full_slice, index)) else index, dim, tuple(n % size for n in places)
    )


def _row(node: fx.Node, dims: int) -> tuple[object, ...] | None:
    """The index that a node takes a part with, if it is made of numbers, full slices and new dims."""
    if not any(picks(node, p) for p in range(len(arguments_of(node)))):
        return None
    if node.target is operator.getitem:
        return spelled_index(node.args[1], dims)
    dim = cast(int, node.args[1])
    return (*[slice(None)] * (dim % dims), node.args[2])


def _piece(base: fx.Node, numbers: Sequence[object]) -> Sliced | None:
    """Pieces that count, of a tensor that `base` takes apart."""
    source = base.args[0] if base.args else None
    tensor, pieces = val_of(source) if isinstance(source, fx.Node) else None, val_of(base)
    if not isinstance(tensor, Tensor) or not isinstance(pieces, (list, tuple)):
        return None
    assert isinstance(source, fx.Node)
    if base.target in (torch.unbind, "unbind"):
        dim = base.args[1] if len(base.args) > 1 else base.kwargs.get("dim", 0)
        return _counted(source, None, cast(int, dim), tensor, numbers)
    if base.target not in (torch.split, "split", torch.chunk, "chunk"):
        return None
    dim = base.args[2] if len(base.args) > 2 else base.kwargs.get("dim", 0)
    sizes = [cast(Tensor, t).shape[cast(int, dim)] for t in pieces]  # pyright: ignore[reportUnknownVariableType]
    if not all(type(n) is int and 0 <= n < len(sizes) for n in numbers) or not all(
        type(n) is int for n in sizes
    ):
        return None
    taken = cast(list[int], list(numbers))
    if len({sizes[n] for n in taken}) != 1:
        return None
    places = [sum(sizes[:n]) for n in taken]
    return _counted(source, None, cast(int, dim), tensor, places, length=sizes[taken[0]])


def indexed(base: fx.Node, val: Tensor, indices: Sequence[object]) -> Sliced | None:
    """`base[index]` with one number, or one part of a fixed length, that counts among slices, numbers and new dims that
    stay."""
    rows = [spelled_index(i, val.dim()) for i in indices]
    first = rows[0]
    counting = [p for p in range(len(first)) if any(r[p] != first[p] for r in rows if len(r) == len(first))]
    if len(counting) != 1 or any(len(r) != len(first) for r in rows):
        return None
    (place,) = counting
    others = (*first[:place], *first[place + 1 :])
    if not all(x is None or type(x) is int or _is_plain(x) for x in others):
        return None
    dim = sum(type(x) is not int for x in first[:place])
    index = (*first[:place], slice(None), *first[place + 1 :])
    size_dim = sum(x is not None for x in first[:place])
    parts = [_part_of(r[place], cast(object, val.shape[size_dim])) for r in rows]
    lengths = {length for _, length in parts}
    if len(lengths) != 1:
        return None
    return _counted(
        base, None if all(map(is_full_slice, index)) else index, dim, val, [n for n, _ in parts], size_dim=size_dim,
        length=lengths.pop(),
    )  # fmt: skip


def spelled_index(index: object, dims: int) -> tuple[object, ...]:
    """An index as a tuple, with full slices in the place of an ellipsis."""
    row: tuple[object, ...] = index if isinstance(index, tuple) else (index,)
    at = next((p for p, x in enumerate(row) if x is Ellipsis), None)
    if at is None:
        return row
    left = dims - sum(x is not None and x is not Ellipsis for x in row)
    return (*row[:at], *(slice(None) for _ in range(left)), *row[at + 1 :])


def _part_of(x: object, size: object) -> tuple[object, int | None]:
    """Where the part of a dim begins that an index takes, and its length, if it is one that can count."""
    if not isinstance(x, slice):
        return x, None
    start, stop = (0 if x.start is None else x.start), (size if x.stop is None else x.stop)
    if type(start) is not int or type(stop) is not int or x.step not in (None, 1):
        return None, None
    if min(start, stop) < 0:
        if type(size) is not int:
            return None, None
        start, stop = start + size * (start < 0), stop + size * (stop < 0)
    return (start, stop - start) if 0 <= start < stop else (None, None)


def is_basic_index(index: object) -> bool:
    """Whether an index takes a part of a tensor: numbers, slices of numbers, new dims, an ellipsis."""
    row: tuple[object, ...] = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is Ellipsis or type(x) is int or _is_plain(x) for x in row)


def _is_plain(x: object) -> bool:
    return isinstance(x, slice) and all(n is None or type(n) is int for n in (x.start, x.stop, x.step))


def is_full_slice(x: object) -> bool:
    """Whether an index takes all of a dim."""
    return isinstance(x, slice) and x == slice(None)


def _counted(
    base: fx.Node, index: tuple[object, ...] | None, dim: int, val: Tensor, numbers: Sequence[object],
    *, size_dim: int | None = None, length: int | None = None,
) -> Sliced | None:  # fmt: skip
    """The parts at these places, if they count up or down by the same."""
    dim = dim % val.dim() if size_dim is None else dim
    size = cast(object, val.shape[dim if size_dim is None else size_dim])
    if any(type(n) is not int for n in numbers):
        return None
    known = cast(list[int], list(numbers))
    if known[0] < 0:
        if not isinstance(size, int):
            return None
        known = [n + size for n in known]
    step = known[1] - known[0]
    if not step or known != list(range(known[0], known[0] + step * len(known), step)) or min(known) < 0:
        return None
    # a part behind the end is shorter or empty, where a number raises
    outside = isinstance(size, int) and max(known) + (length or 1) > size
    return None if outside else Sliced(base, index, dim, known[0], step, length)
