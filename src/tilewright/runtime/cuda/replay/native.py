"""A replay of a CUDA graph in one native call: inputs that it reads in place are looked at, others are copied in, the
graph is launched, results are copied into new tensors."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewright.plan.data import Plan
from tilewright.runtime.cuda.driver import Device, current_stream
from tilewright.runtime.objects.known_call import output_rows
from tilewright.runtime.objects.reading import LayoutTable, Lies, reader, table_of
from tilewright.runtime.objects.standing import standing
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Quick
from tilewright.runtime.plan.launch import raise_error
from tilewright.runtime.plan.tensors import Make, memory_range, repeats_memory

from .exits import Exit


class Fixed:
    """Inputs that a graph reads in place."""

    def __init__(self, inputs: Mapping[int, Tensor]) -> None:
        """`inputs` by number."""
        self._where = tuple((k, _lies(t)) for k, t in inputs.items())
        self._read = reader(
            [Lies(k, 0, tuple(t.shape), t.stride(), t.data_ptr(), t) for k, t in inputs.items()]
        )
        look = standing(tuple(inputs))
        noted = dict(inputs)
        found = look is not None and look.note([noted.get(k) for k in range(max(noted, default=-1) + 1)])
        self._look = look if found else None
        self.still: Callable[[list[Argument]], bool] = self.stand if self._look is None else self._look.still
        """The same as `stand`, which also says no of what it would have to look at longer."""
        self.looked_at = () if self._look is None else tuple(inputs)
        """Arguments of which `still` sees every change."""

    def stand(self, args: list[Argument]) -> bool:
        """Whether they are still where they were, of the same sizes, strides and types."""
        if self._look is not None and self._look.still(args):
            return True
        if not (self._read is not None and self._read(args, 0)):
            for k, lies in self._where:
                t = args[k]
                if not isinstance(t, Tensor) or _lies(t) != lies:
                    return False
        if self._look is not None:
            self._look.note(args)
        return True


def _lies(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


class Ports(NamedTuple):
    """What a graph copies in and out: inputs by number and their copies, results, and the order in which these
    leave."""

    moving: tuple[int, ...]
    held: tuple[Tensor, ...]
    copied: Sequence[Tensor]
    order: tuple[int, ...]


def ports_of(
    plan: Plan,
    moving: tuple[int, ...],
    held: tuple[Tensor, ...],
    copied: Sequence[Tensor],
    exits: Sequence[Exit],
) -> Ports | None:
    """What is copied, if that is all there is to do: nothing is written back, no result shows an input or a part of
    another, and every tensor fills the memory that it spans."""
    if set(moving) & {*plan.written, *plan.host} or not all(map(_is_whole, (*held, *copied))):
        return None
    if not all(e.lent is None and e.number >= 0 and not e.of_input and e.view is None for e in exits):
        return None
    order = tuple(e.number for e in exits)
    if len(set(order)) < len(order):
        return None
    return Ports(moving, held, copied, order)


def _is_whole(t: Tensor) -> bool:
    low, high = memory_range(t)
    return high - low == t.nbytes and not repeats_memory(t)


class _Replay(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("instance", ctypes.c_void_p),
        ("copies", ctypes.c_void_p),
        ("before", ctypes.c_int64),
        ("behind", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("moving", LayoutTable),
        ("output", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        *(
            (name, ctypes.c_void_p)
            for name in ("stand", "make", "fail", "lack", "acquire", "release", "stream", "ordinal")
        ),
        ("written", ctypes.c_void_p),
    )


class Shared(NamedTuple):
    """What replays of one graph's memory share: a lock, and the stream that used it last (-1: none)."""

    lock: threading.Lock
    stream: array[int]


class Instantiated(Protocol):
    """A graph of torch's. The driver's ends with it, and so does the memory that it works in."""

    def raw_cuda_graph_exec(self) -> int:
        """The driver's handle."""
        ...


Written = Callable[[list[Argument]], object]
"""Told the arguments of a call that writes into some of them."""


def native_replay(
    device: Device,
    graph: Instantiated,
    ports: Ports,
    fixed: Fixed,
    shared: Shared,
    rest: tuple[Make, Written | None],
) -> Quick | None:
    """The replay of a graph as a native function of the list of arguments: the list of results, or None, and nothing
    has run, where it does not serve them now. None without a native side. `rest`: what makes results, and who is told
    of inputs that are written. The function keeps the graph: a known call may have it when another one has long been
    captured for such calls.

    The copies are of bytes from the first to the last element, so that tensors must fill what they span."""
    if not device.driver.sees_objects:
        return None
    make, written = rest
    held, copied = ports.held, ports.copied
    before = [(t.data_ptr(), 0, t.nbytes) for t in held]
    behind = [(0, t.data_ptr(), t.nbytes) for t in copied]
    # Of each copy, the addresses of target and source, and bytes.
    copies = array("Q", [number for row in (*before, *behind) for number in row] or [0])
    moving = table_of([
        Lies(k, 3 * n + 1, tuple(t.shape), t.stride())
        for n, (k, t) in enumerate(zip(ports.moving, held, strict=True))
    ])  # fmt: skip
    places = {number: place for place, number in enumerate(ports.order)}
    made = [(places[n], len(held) + n, tuple(t.shape), t.stride(), t.dtype) for n, t in enumerate(copied)]
    rows = output_rows(made)

    def fail(code: int) -> None:
        if code < 0:
            raise device.driver.run_failed(code)
        raise_error(code)

    objects: tuple[Any, ...] = (
        fixed.still, make, fail, torch.OutOfMemoryError, shared.lock.acquire, shared.lock.release, current_stream,
        device.ordinal,
    )  # fmt: skip
    at = ctypes.addressof
    place = id  # what is meant is the object itself, which the function keeps
    table = _Replay(
        device.address, graph.raw_cuda_graph_exec(), copies.buffer_info()[0], len(before), len(behind), len(made),
        moving, at(rows), shared.stream.buffer_info()[0], *map(place, objects), written and place(written),
    )  # fmt: skip
    rest_held = written, device, shared, held, copied, graph
    function: Quick = device.driver.replayer(
        (at(table), table, (copies, moving, rows, made), objects, rest_held)
    )
    return function
