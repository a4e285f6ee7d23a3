"""How results leave a CUDA graph: as views of inputs, as copies, or lent."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import UnsupportedError
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Result
from tilewright.runtime.plan.tensors import memory_range, repeats_memory


@dataclass(frozen=True, slots=True, eq=False)
class Exit:
    """How one result leaves: as it is (`number` -1), as a view of input number `number`, or of copy number `number`;
    `lent`, as an alias of itself. `view` is (shape, strides, elements behind the start of the input or copy); None: all
    of it."""

    plain: Result = None
    number: int = -1
    of_input: bool = False
    view: tuple[torch.Size, tuple[int, ...], int] | None = None
    lent: Tensor | None = None


def exits_of(
    results: Sequence[Result], inputs: Sequence[Argument], lends: range = range(0)
) -> tuple[list[Exit], list[Tensor]]:
    """How results leave, and what must be copied out for them. Results that share memory share its copy; those whose
    numbers are in `lends` are lent where they share none with others."""
    of = {memory_of(t): (k, t) for k, t in enumerate(inputs) if isinstance(t, Tensor)}
    shared: dict[int, list[Tensor]] = {}
    places: dict[int, set[bool]] = {}
    for k, r in enumerate(results):
        if isinstance(r, Tensor):
            shared.setdefault(memory_of(r), []).append(r)
            places.setdefault(memory_of(r), set()).add(k in lends)
    exits: list[Exit] = []
    copies: list[Tensor] = []
    number: dict[int, int] = {}
    for place, r in enumerate(results):
        if not isinstance(r, Tensor):
            exits.append(Exit(r))
            continue
        memory = memory_of(r)
        if memory in of and r.numel():
            k, t = of[memory]
            exits.append(
                Exit(None, k, True, (r.shape, r.stride(), int(r.storage_offset() - t.storage_offset())))
            )
            continue
        if place in lends and r.numel() and places[memory] == {True}:
            exits.append(Exit(lent=_alone(r)))
            continue
        group = shared[memory]
        if not r.numel() or (len(group) == 1 and not repeats_memory(r)):
            exits.append(Exit(None, len(copies)))
            copies.append(r)
            continue
        if len({t.dtype for t in group}) > 1:
            raise UnsupportedError("results of several types in one memory", phase="run")
        low = min(t.storage_offset() for t in group)
        if memory not in number:
            number[memory] = len(copies)
            high = max(
                (memory_range(t)[1] - t.data_ptr()) // t.element_size() + t.storage_offset() for t in group
            )
            copies.append(r.as_strided((high - low,), (1,), low))
        exits.append(Exit(None, number[memory], False, (r.shape, r.stride(), int(r.storage_offset() - low))))
    return exits, copies


def memory_of(t: Tensor) -> int:
    """Where the storage of a tensor begins: those of one storage share memory."""
    return t.untyped_storage().data_ptr()


def leave(e: Exit, args: Sequence[Argument], copies: Sequence[Tensor]) -> Result:
    """The result that leaves so, of a call with `args`, for which `copies` were made."""
    if e.lent is not None:
        return e.lent.detach()
    if e.number < 0:
        return e.plain
    source = args[e.number] if e.of_input else copies[e.number]
    assert isinstance(source, Tensor)
    if e.view is None:
        return source
    shape, strides, offset = e.view
    if e.of_input and not offset and source.shape == shape and source.stride() == strides:
        return source
    return source.as_strided(shape, strides, source.storage_offset() + offset)


class Lent:
    """Memory of a graph that a caller reads: whoever holds it, or a view of it, counts as a user of its storage."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` are all that this file holds of one storage."""
        self._storage = tensors[0].untyped_storage()
        self._idle = len({id(t) for t in tensors}) + 1

    def in_use(self) -> bool:
        """Whether somebody else holds it."""
        return torch._C._storage_Use_Count(self._storage._cdata) > self._idle


def _alone(t: Tensor) -> Tensor:
    """`t` as a tensor of its own, which keeps no other of the same storage alive."""
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    return made.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def lent_by(exits: Sequence[Exit]) -> tuple[Lent, ...]:
    """The memory that leaves lent, each storage once."""
    held: dict[int, list[Tensor]] = {}
    for e in exits:
        if e.lent is not None:
            held.setdefault(memory_of(e.lent), []).append(e.lent)
    return tuple(map(Lent, held.values()))
