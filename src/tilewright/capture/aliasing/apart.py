"""Whether tensors of one call are proved to have no element in common.

Two tensors of one storage lie apart if their bytes do not meet, or if no choice of elements lies in one place: elements
i of a and j of b do if b's start - a's = sum of i_d * stride_d of a - sum of j_d * stride_d of b."""

# What torch tells of memory it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_owners = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]


def _count(t: Tensor) -> int:
    """Who holds the storage of `t`: tensors, and the object through which Python asks."""
    storage = t.untyped_storage()
    return _owners(storage._cdata)


_ALONE = _count(torch.empty(1))
"""Of a storage that one tensor holds."""


Prover = Callable[[list[object]], bool]
"""Whether it is seen that no written tensor among the arguments shares bytes with another one."""

PROVERS: list[Callable[[Sequence[tuple[int, int, bool]]], Prover]] = []
"""What makes a quick one for tensors (number of the argument, bytes of an element, whether it is written), once native
code is there: one call in place of one for each tensor."""


class LieApart:
    """Looks at the arguments of one program, call by call, whose types stay what they were in the first one."""

    def __init__(self, written: Sequence[int], tensors: Sequence[int]) -> None:
        """Numbers of the arguments that are written, and of all that have a storage."""
        self._written, self._tensors = frozenset(written), tuple(tensors)
        self._prover: Prover | None = None

    def __call__(self, args: Sequence[object]) -> bool:
        """Whether it is seen at once that no written one shares bytes with another one."""
        if self._prover is None:
            given = [(k, t) for k in self._tensors if isinstance(t := args[k], Tensor)]
            if not PROVERS or len(given) < len(self._tensors):
                return False
            self._prover = PROVERS[0]([(k, t.element_size(), k in self._written) for k, t in given])
        return self._prover(args if isinstance(args, list) else list(args))


def is_shared(t: Tensor) -> bool:
    """Whether any other tensor of the process may have the storage of `t`."""
    return _count(t) > _ALONE


def may_meet(args: Sequence[object], written: Sequence[int], tensors: Sequence[int]) -> bool:
    """Whether a `written` argument may have the storage of another tensor. `tensors` are the numbers of all arguments
    that have a storage."""
    once = len({id(args[k]) for k in tensors}) == len(tensors)
    return not once or any(isinstance(t := args[k], Tensor) and is_shared(t) for k in written)


def meet(args: Sequence[object], written: Sequence[int], tensors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a `written` argument and another one that are not proved to lie apart. `tensors` as above."""
    if not may_meet(args, written, tensors):
        return
    by_storage: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for k in tensors:
        if isinstance(t := args[k], Tensor) and t.numel():
            by_storage[t.untyped_storage()._cdata].append((*_span(t), k))
    targets = frozenset(written)
    for spans in by_storage.values():
        if len(spans) > 1 and any(k in targets for *_, k in spans):
            yield from _meeting(args, sorted(spans), targets)


def _meeting(
    args: Sequence[object], spans: Sequence[tuple[int, int, int]], targets: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """The pairs among arguments of one storage, which come with their bytes and in their order."""
    for i, (_, end, k) in enumerate(spans):
        for start, _, j in spans[i + 1 :]:
            if start >= end:
                break
            a, b = args[k], args[j]
            if targets & {k, j} and isinstance(a, Tensor) and isinstance(b, Tensor) and not lie_apart(a, b):
                yield (k, j) if k in targets else (j, k)


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of a storage in which a tensor with elements lies: the first one, and the one behind the last."""
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    start = int(t.storage_offset())
    return start * t.element_size(), (start + reach + 1) * t.element_size()


def lie_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage are proved to have no element in common."""
    if not a.numel() or not b.numel():
        return True
    (low, end), (start, high) = _span(a), _span(b)
    if end <= start or high <= low:
        return True
    if a.element_size() != b.element_size():
        return False
    distance = int(b.storage_offset()) - int(a.storage_offset())
    steps = [s for t in (a, b) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]
    common = math.gcd(*steps)
    if distance % common if common else distance:
        return True
    if a.stride() != b.stride():
        return False
    dims = [(s, m, n) for s, m, n in zip(a.stride(), a.shape, b.shape, strict=True) if s and (m > 1 or n > 1)]
    return _is_unreached(distance, sorted(dims))


def _is_unreached(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether no steps of these strides, from -(n - 1) to m - 1 of each, are known to make up a distance. With strides
    as large as all that the smaller ones reach, only two counts of each come near."""
    if not dims:
        return distance != 0
    *inner, (stride, m, n) = dims
    reach = sum(s * (max(p, q) - 1) for s, p, q in inner)
    if reach >= stride:
        return False
    near = {distance // stride, -(-distance // stride)}
    return all(not -(n - 1) <= k <= m - 1 or _is_unreached(distance - k * stride, inner) for k in near)
