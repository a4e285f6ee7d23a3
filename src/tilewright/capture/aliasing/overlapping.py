"""Writes into tensors that overlap with themselves, or into windows with gaps: eager mode runs the program, since no
value of such a tensor stands for its memory.

Torch makes a program functional by giving each write a new value, and scatters that value back over the memory. Where
two elements lie in one place it is not said which of them stays: windows of a row, `as_strided` with small strides,
inputs that are expanded. And of windows of a row (`unfold`) it takes all elements that none of them holds for zeros.

Inputs that share memory, one of which is written, torch takes for views of one base. Where such a program returns a
view of one, torch takes that view of the base instead; some programs of this kind it refuses."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import OutputType

from tilewright.capture.loops.leaving import memories_of, overlaps, seen_to_write
from tilewright.capture.loops.nodes import val_of
from tilewright.errors import UnsupportedError


class OverlappingWrite(UnsupportedError):
    """A write into such a tensor."""


_SEVERAL = "a tensor of which several elements lie in one place"
_GAPS = "windows that leave elements out"


def refuse_overlapping_writes(gm: fx.GraphModule) -> None:
    """Raise OverlappingWrite if something writes into such a tensor or a view of it. Nodes carry examples of their
    values."""
    _refuse_writes_by_place(gm)
    shown: dict[fx.Node, tuple[int, str]] = {}
    """What shows such a tensor's memory, and what is unclear about it."""
    for node in gm.graph.nodes:
        given = dict(shown[n] for n in node.all_input_nodes if n in shown)
        if given and node.op != "output" and seen_to_write(node, given):
            raise OverlappingWrite(
                f"a write into {next(iter(given.values()))}", phase="capture",
                op=str(node.target), place=str(node.meta.get("stack_trace", "")).strip().split("\n")[0],
                hint="write into a copy (`clone()`) of the tensor",
            )  # fmt: skip
        value = val_of(node)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            memory = next(memories_of(value), None)
            why = given.get(memory) if memory is not None else None
            why = why or (
                _SEVERAL if _is_unclear(node, value) else _GAPS if _leaves_gaps(node, value) else None
            )
            if memory is not None and why is not None:
                shown[node] = memory, why


def _is_unclear(node: fx.Node, value: Tensor) -> bool:
    """Whether a tensor overlaps with itself in a way in which torch cannot make writes into it functional. (Expanded
    tensors that the program makes itself it can.)"""
    expanded = any(type(s) is int and s == 0 for s in value.stride())
    return overlaps(value) and (node.op == "placeholder" or not expanded)


class Facts(Protocol):
    """What torch's autograd found out about a program."""

    @property
    def input_info(self) -> Sequence[object]:
        """One entry for each input of the graph."""
        ...

    @property
    def output_info(self) -> Sequence[OutputFacts]:
        """One entry for each result of the program."""
        ...


class OutputFacts(Protocol):
    """The same about a result."""

    @property
    def output_type(self) -> OutputType:
        """Whose memory it is."""
        ...


def refuse_views_of_bases(facts: Facts, count: int) -> None:
    """Raise OverlappingWrite if some of the `count` inputs became one base, and the program returns a view of one."""
    if len(facts.input_info) >= count:
        return
    if any(o.output_type in (OutputType.alias_of_input, OutputType.is_input) for o in facts.output_info):
        raise OverlappingWrite(
            "a result that shows an input, of inputs that share memory and are written to", phase="capture",
            hint="return a copy (`clone()`), or give inputs that share no memory",
        )  # fmt: skip


_UNHANDLED = (
    "aot_autograd() does not yet handle",
    "Encountered aliased inputs that are mutated in the graph",
)
"""How torch begins to say that it does not follow inputs that share memory, one of which is written."""


@contextmanager
def refused_by_torch(gm: fx.GraphModule, failed: Sequence[str]) -> Generator[None]:
    """What torch refuses inside because of such inputs, or asserts in a program of such, is an OverlappingWrite: but
    for what `failed` in a compilation of ours."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        memories = [m for n in gm.graph.find_nodes(op="placeholder") for m in memories_of(val_of(n))]
        asserted = isinstance(error, AssertionError) and len(set(memories)) < len(memories)
        if failed or not (asserted or str(error).strip().startswith(_UNHANDLED)):
            raise
        raise OverlappingWrite(
            "inputs that share memory and are written to, of different types, classes or gradients", phase="capture",
            hint="give inputs that share no memory, one of them as a `clone()`",
        ) from error  # fmt: skip


_BY_PLACE = (
    "as_strided", torch.as_strided, torch.Tensor.as_strided, torch.ops.aten.as_strided.default,
    "fill_diagonal_", torch.Tensor.fill_diagonal_, torch.ops.aten.fill_diagonal_.default,
)  # fmt: skip


def _refuse_writes_by_place(gm: fx.GraphModule) -> None:
    """Raise OverlappingWrite if something writes into the memory of an input of which the program shows a part by
    place, unless the input holds every place: the value that stands for it once it is written to holds no others."""
    named = [n.all_input_nodes[0] for n in gm.graph.nodes if n.target in _BY_PLACE]
    if not named:
        return
    inputs = [t for n in gm.graph.find_nodes(op="placeholder") if isinstance(t := val_of(n), Tensor)]
    partly = {m for t in inputs for m in memories_of(t)} - {
        m for t in inputs if _fills(t) for m in memories_of(t)
    }
    shown = partly & {m for n in named for m in memories_of(val_of(n))}
    for node in gm.graph.nodes if shown else ():
        touched = {m for n in node.all_input_nodes for m in memories_of(val_of(n)) if m in shown}
        if touched and node.op != "output" and seen_to_write(node, touched):
            raise OverlappingWrite(
                "an input of which a part is shown by place", phase="capture", op=str(node.target),
                hint="write into a copy (`clone()`) of it",
            )  # fmt: skip


def _fills(t: Tensor) -> bool:
    """Whether a tensor is known to hold all elements of its storage, at the sizes that are known or were seen."""
    count, start, held = _count(t), _seen(t.storage_offset()), _seen(t.untyped_storage().nbytes())
    return count is not None and start == 0 and held == count * t.element_size()


def _seen(n: int | torch.SymInt) -> int | None:
    return n.node.hint if isinstance(n, torch.SymInt) else n


_WINDOWS = ("unfold", torch.Tensor.unfold, torch.ops.aten.unfold.default)


def _leaves_gaps(node: fx.Node, value: Tensor) -> bool:
    """Whether these are windows that do not hold all elements, at the sizes that are known or were seen."""
    if node.op not in ("call_method", "call_function") or node.target not in _WINDOWS:
        return False
    source = val_of(node.all_input_nodes[0])
    return not isinstance(source, Tensor) or _count(source) != _count(value)


def _count(t: Tensor) -> int | None:
    sizes = [_seen(n) for n in t.shape]
    return None if None in sizes else math.prod(n for n in sizes if n is not None)
