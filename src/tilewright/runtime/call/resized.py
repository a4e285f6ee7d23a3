"""A compiled model that is compiled again because sizes differ: that is said, with what keeps it from happening."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.capture.described import Signature, TensorInfo

from .dynamic_dims import Dim

Change = tuple[str, int, int, int | str]
"""An input, a dim of it, its size before, and what it is now."""


def sizes_changed(
    before: Sequence[Signature], now: Signature, named: Sequence[Dim] = ()
) -> tuple[Change, ...]:
    """Dims of fixed size in the graph that is most like the new one, whose inputs have the same names, types and ranks.
    None where there is no such graph, or where it is not for sizes that another one is made; and none of those that are
    `named` already, of which sizes 0 and 1 have graphs of their own."""
    found = [change for each in before if (change := _changes(each, now)) is not None]
    ranks = {t.name: len(t.shape or ()) for t in now.inputs}
    free = {(d.input, d.place % max(1, ranks.get(d.input, 0))) for d in named}
    return tuple(c for c in min(found, key=len, default=()) if (c[0], c[1]) not in free)


def _changes(before: Signature, now: Signature) -> tuple[Change, ...] | None:
    if len(before.inputs) != len(now.inputs):
        return None
    changes: list[Change] = []
    for old, new in zip(before.inputs, now.inputs, strict=True):
        if not _is_alike(old, new):
            return None
        for dim, (a, b) in enumerate(zip(old.shape or (), new.shape or (), strict=True)):
            if isinstance(a, int) and a != b:
                changes.append((old.name, dim, a, b))
    return tuple(changes)


def _is_alike(old: TensorInfo, new: TensorInfo) -> bool:
    same = (old.name, old.dtype) == (new.name, new.dtype)
    return same and old.shape is not None and new.shape is not None and len(old.shape) == len(new.shape)


def told(title: str, changes: Sequence[Change], named: Sequence[Dim] = ()) -> str:
    """The warning. `named` dims may change already, and are named again."""
    texts = [
        f"{name}:{dim} was {a} and {f'is {b}' if isinstance(b, int) else 'may be any size'} now"
        for name, dim, a, b in changes
    ]
    dims: dict[str, dict[int, object]] = {}
    for d in named:
        dims.setdefault(d.input, {})[d.place] = d.name if d.low is None else (d.name, d.low, d.high)
    names: dict[tuple[int, int | str], str] = {}
    for name, dim, a, b in changes:
        # dims that changed from the same size to the same are taken for one
        dims.setdefault(name, {})[dim] = names.setdefault((a, b), f"size{len(names)}")
    return (
        f"{title} was compiled again for other sizes: {'; '.join(texts)}. "
        f"One graph serves all of them with tilewright.compile(..., dims={dims})"
    )
