"""How the tensors of a captured program lie in memory, as its fake values say, and what of that calls rely on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from tilewright.capture.aten import NoDeclaration
from tilewright.capture.aten.library import addresses_storage
from tilewright.capture.symbols import Symbols
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.ops.strided import Lying, nested, with_elements

aten = torch.ops.aten


def storage_of(node: object) -> int | None:
    """A number that two nodes share if and only if the program gave them the same storage; None if it has none."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(val, Tensor) or val.layout is not torch.strided:
        return None
    return val.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class MemoryFinder:
    """Finds out how nodes lie. `entries` is what each node became so far."""

    symbols: Symbols
    entries: Mapping[fx.Node, object]

    def lying(self, node: fx.Node) -> Lying | None:
        """How the tensor of `node` (its first one) lies in its storage; None for what has no strides."""
        val = node.meta.get("val")
        val = val[0] if isinstance(val, (list, tuple)) and val else val
        if not isinstance(val, Tensor) or val.layout is not torch.strided:
            return None
        expr = self.symbols.expr
        storage = val.untyped_storage().nbytes() // val.element_size()
        offset = expr(val.storage_offset() + _forgotten(node))
        return Lying(self.symbols.shape(val.stride()), offset, expr(storage))

    def bases(self, node: fx.Node) -> Iterator[tuple[Value, Lying]]:
        """Tensors of one type and storage with `node`, and how they lie: one that fills the storage, if the program has
        one, and `node` itself."""
        chain = [node]
        while (source := _shown(chain[-1])) is not None:
            chain.append(source)
        own = node.meta["val"]
        for at in reversed(chain):
            made = self.entries.get(at)
            lying = self.lying(at) if at.meta["val"].dtype == own.dtype else None
            if lying is not None and isinstance(made, Value) and (at is node or lying.fills(made.shape)):
                yield made, lying

    def placed(self, node: fx.Node) -> tuple[fx.Node, Lying] | None:
        """The input whose storage the node's op addresses by a place that the program names, and how it lies there."""
        first = by_place(node)[:1]
        named = _named_place(node)
        if not first or named is None or isinstance(named, (list, tuple)):
            return None
        (root,) = first
        while (source := _shown(root)) is not None:
            root = source
        lying = self.lying(root) if root.op == "placeholder" else None
        return None if lying is None else (root, lying)

    def fills(self, node: fx.Node) -> bool:
        """Whether the tensor of `node` is proved to show every element of its storage."""
        lying, made = self.lying(node), self.entries.get(node)
        return lying is not None and isinstance(made, Value) and lying.fills(made.shape)

    def strides_of(self, node: fx.Node, inputs: Sequence[Value]) -> tuple[tuple[Expr, ...] | None, ...]:
        """The strides that a call may rely on, by operand: those of the program, since the call may view it in another
        shape and its results follow them. Not those of tensors whose elements share memory, which no copy can have."""
        held: dict[Value, tuple[Expr, ...]] = {}
        for source in node.all_input_nodes:
            made, val = self.entries.get(source), source.meta.get("val")
            if isinstance(made, Value) and isinstance(val, Tensor) and val.layout is torch.strided:
                strides = self.symbols.strides(val)
                if nested(*with_elements(made.shape, strides)) is not None:
                    held[made] = strides
        return tuple(held.get(v) for v in inputs)


def _shown(node: fx.Node) -> fx.Node | None:
    """The operand whose memory `node` shows."""
    own = storage_of(node)
    if own is None or node.op != "call_function":
        return None
    return next((n for n in node.all_input_nodes if storage_of(n) == own), None)


def _forgotten(node: fx.Node) -> int | torch.SymInt:
    """How much further behind in its storage a tensor lies than its fake says. What as_strided_scatter makes lies where
    its operand does, and torch's cache of fakes forgets where: of it, and so of its views."""
    found: int | torch.SymInt = 0
    at: fx.Node | None = node
    while at is not None:
        source = _shown(at)
        if at.target is aten.as_strided_scatter.default:
            (source, *_) = at.all_input_nodes
            found = found + source.meta["val"].storage_offset() - at.meta["val"].storage_offset()
        elif at.target is aten.as_strided.default and _named_place(at) is not None:
            break
        at = source
    return found


def _named_place(node: fx.Node) -> object:
    """The place in memory that an op names as its last argument, if it does."""
    return node.args[-1] if len(node.args) > 3 else node.kwargs.get("storage_offset")


def by_place(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands whose storage the node's op, or one inside of it, addresses by place, not by element."""
    if isinstance(node.target, OpOverload):
        return tuple(node.all_input_nodes[:1]) if addresses_storage(node.target) else ()
    graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [getattr(n.graph.owning_module, str(n.target), None) for n in graphs]
    inside = (n for b in bodies if isinstance(b, fx.GraphModule) for n in b.graph.nodes)
    return tuple(node.all_input_nodes) if any(map(by_place, inside)) else ()


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """How the first operand and the first result of `node` lie."""

    memory: MemoryFinder
    node: fx.Node

    def operand(self) -> Lying:
        """How the first operand lies. Raises NoDeclaration if it has no strides."""
        return self._known(self._first())

    def result(self) -> Lying:
        """How the first result lies. Raises NoDeclaration if it has no strides."""
        return self._known(self.node)

    def bases(self) -> Iterator[tuple[Value, Lying]]:
        """As `MemoryFinder.bases` of the first operand."""
        return self.memory.bases(self._first())

    def _first(self) -> fx.Node:
        first = self.node.args[0] if self.node.args else None
        if not isinstance(first, fx.Node):
            raise NoDeclaration("unknown strides")
        return first

    def _known(self, node: fx.Node) -> Lying:
        lying = self.memory.lying(node)
        if lying is None:
            raise NoDeclaration("unknown strides")
        return lying
