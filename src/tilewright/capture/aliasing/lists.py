"""Ops over lists that write, where one tensor of a list shows what another holds: one op for each tensor, in order.

Eager mode goes through the lists and reads what it has just written. Torch makes such an op functional as a whole, and
all of it then reads what was there before: `_foreach_add_(xs, [xs[0], xs[0]])`, or a list that holds a tensor twice."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

from tilewright.capture.loops.leaving import memories_of
from tilewright.capture.loops.nodes import val_of

from .overlapping import OverlappingWrite


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory that a tensor shows: of a storage, bytes from `start` on, to all behind if `stop` is None."""

    storage: int
    start: int
    stop: int | None

    def meets(self, other: _Place) -> bool:
        return self.storage == other.storage and all(
            b is None or a < b for a, b in ((self.start, other.stop), (other.start, self.stop))
        )


def write_lists_in_order(gm: fx.GraphModule) -> None:
    """Replace such ops in a graph and in its bodies. Nodes carry examples of their values. Raises OverlappingWrite for
    one whose results are not taken one by one."""
    for module in gm.modules():
        changed = False
        for node in list(module.graph.nodes) if isinstance(module, fx.GraphModule) else ():
            if _writes_lists(node) and _reads_what_it_wrote(node):
                _refuse_whole_results(node)
                _apart(node)
                changed = True
        if changed and isinstance(module, fx.GraphModule):
            module.recompile()


def _writes_lists(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_")


def _written(node: fx.Node) -> Sequence[Argument]:
    """The list that an op writes; empty if it is not known tensor by tensor."""
    written = node.args[0] if node.args else node.kwargs.get("self")
    return written if isinstance(written, (list, tuple)) else ()


def _reads_what_it_wrote(node: fx.Node) -> bool:
    """Whether something for a later tensor is written for an earlier one."""
    written: list[_Place] = []
    for k, target in enumerate(_written(node)):
        given, kwargs = _nth(node, k)
        read = [p for a in tree_leaves((given, kwargs)) for p in _places(a)]
        if any(a.meets(b) for a in written for b in read):
            return True
        written += _places(target)
    return False


def _places(value: object) -> Iterator[_Place]:
    example = val_of(value) if isinstance(value, fx.Node) else None
    if not isinstance(example, Tensor) or example.layout is not torch.strided:
        return
    start: object = example.storage_offset()
    reach: object = sum((n - 1) * s for n, s in zip(example.shape, example.stride(), strict=True)) + 1
    width = example.element_size()
    for storage in memories_of(example):
        if type(start) is int and type(reach) is int:
            yield _Place(storage, start * width, (start + reach) * width)
        else:
            yield _Place(storage, 0, None)


def _refuse_whole_results(node: fx.Node) -> None:
    if any(user.target is not operator.getitem for user in node.users):
        raise OverlappingWrite(
            "a list of tensors that overlap is written, and its results are used as a whole", phase="capture",
            op=str(node.target), hint="write the ops one by one",
        )  # fmt: skip


def _apart(node: fx.Node) -> None:
    """Replace an op over lists by one for each tensor."""
    assert callable(node.target)
    single: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for k, target in enumerate(_written(node)):
            args, kwargs = _nth(node, k)
            single.append(node.graph.call_function(node.target, args, kwargs))
            single[-1].meta = {name: value for name, value in node.meta.items() if name != "example_value"}
            if isinstance(target, fx.Node):
                single[-1].meta["example_value"] = [val_of(target)]
    for user in list(node.users):
        user.args = (single[user.args[1]], 0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    node.graph.erase_node(node)


def _nth(node: fx.Node, k: int) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """The arguments of an op for the k-th tensor of its lists."""
    return tuple(_slice(a, k) for a in node.args), {n: _slice(a, k) for n, a in node.kwargs.items()}


def _slice(argument: Argument, k: int) -> Argument:
    return [argument[k]] if isinstance(argument, (list, tuple)) else argument
