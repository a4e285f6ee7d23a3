"""From a captured torch graph (with a fake value on every node) to our `Graph`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.capture.aliasing.memory import MemoryFinder, NodeMemory, by_place
from tilewright.capture.aten.library import any_strides, collective, library_reason, library_target
from tilewright.capture.aten.tasks import task_of
from tilewright.capture.in_place import in_place_of, line_of
from tilewright.capture.loops.body import loop_call
from tilewright.capture.loops.higher import with_loop_ops
from tilewright.capture.loops.op import loop_op
from tilewright.capture.placement.device import graph_device
from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.builder import Builder, traced_with
from tilewright.ir.dtype import Kind, f32
from tilewright.ir.expr import Expr
from tilewright.ir.expr import call as expr_call
from tilewright.ir.graph import CHECK, Graph, Layout, LibraryCall, Operand, Value, Write, symbols_in
from tilewright.ir.ops import pointwise
from tilewright.ir.ops.common import access
from tilewright.ir.sizes import dims
from tilewright.ir.task import Convolution, Product

from .aten import Call, NoDeclaration, OpEntry, ReplacementCall, entry_of, to_dtype
from .environment import shape_env, traced_sizes
from .node import (
    NUMBERS,
    NodeResult,
    agree,
    display_name,
    leaves_of,
    mutations,
    place_of,
    plain_number,
    quantised_types,
    refuses_types,
    shaped_like,
    used_results,
    values_in,
)
from .symbols import Ranges, SymbolicNumber, Symbols

_DIVISIONS = {operator.floordiv, operator.mod, operator.truediv}
_DROPPED = {"sym_constrain_range", "sym_constrain_range_for_size", "_assert_tensor_metadata"}
_MISSING = object()
_TAKES_ANY = ("contraction", "convolution")
"""Calls that read their operands by their strides. Others may take them to lie as they do in the program: torch asks
for that before it takes a routine of fused attention, and copies the weights of a group norm."""


def from_fx(
    gm: fx.GraphModule,
    *,
    frozen: Mapping[str, torch.Tensor] | None = None,
    ranges: Ranges | None = None,
    repeated: bool = False,
) -> Graph:
    """The graph of `gm`, whose nodes carry `meta["val"]`. Placeholders named in `frozen` become constants of that
    tensor. Copies into a placeholder become `Graph.writes`. Sizes that `ranges` names are in those, not in the
    ones that they were traced with. `repeated` says that it runs step by step, many times. Installs no guard.

    Raises UnsupportedError for a size expression or a node that has no path, VerifyError for a defect of ours."""
    with traced_with(traced_sizes(gm)):
        return _Importer(with_loop_ops(gm), frozen or {}, ranges, repeated).run()


class _Importer:
    def __init__(
        self,
        gm: fx.GraphModule,
        frozen: Mapping[str, torch.Tensor],
        ranges: Ranges | None,
        repeated: bool = False,
    ) -> None:
        self.gm = gm
        self.frozen = frozen
        self.ranges, self.repeated = ranges, repeated
        env = shape_env(gm)
        self.device = graph_device(gm)
        self.symbols, self.claims = Symbols(env, ranges=ranges), Symbols(env, asserted=False, ranges=ranges)
        self.b = Builder()
        self.entries: dict[fx.Node, object] = {}
        self.memory = MemoryFinder(self.symbols, self.entries)
        self.inputs: list[Value | Expr] = []
        self.places: dict[fx.Node, int] = {}
        self.layouts: dict[Value, Layout] = {}
        self.writes: list[Write] = []
        self.placed: dict[int, Expr] = {}

    def run(self) -> Graph:
        for node in mutations(self.gm):
            raise UnsupportedError(
                "a write into an intermediate tensor", phase="capture", op=display_name(node.target),
                place=place_of(node), hint="make the graph functional first",
            )  # fmt: skip
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "get_attr":
                self.entries[node] = self.attribute(node)
            elif node.op == "call_function":
                self.entries[node] = self.call(node)
            elif node.op == "output":
                return self.finish(node)
            else:
                raise UnsupportedError(f"a node of kind {node.op}", phase="capture", op=str(node.target))
        raise VerifyError("the captured graph has no output", phase="capture")

    def placeholder(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            result = self.result(val)
            if node.name in self.frozen:
                self.entries[node] = self.constant(self.frozen[node.name], result)
                return
            value = self.b.value(result.shape, result.dtype)
            self.layouts[value] = Layout(result.strides)
            self.entries[node], self.places[node] = value, len(self.inputs)
            self.inputs.append(value)
        elif isinstance(val, NUMBERS):
            self.entries[node] = self.symbols.expr(val)
            self.inputs.append(self.symbols.expr(val))
        else:
            raise UnsupportedError(f"an input of type {type(val).__name__}", phase="capture", op=node.name)

    def attribute(self, node: fx.Node) -> object:
        held: object = self.gm
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if not isinstance(held, torch.Tensor):
            return held
        if isinstance(held, FakeTensor):  # the token that keeps effects in order, of a scan's body
            raise UnsupportedError(
                "an op in a scan that may raise or print", phase="capture", op=node.name,
                hint="torch loses it there: write the scan as a Python loop",
            )  # fmt: skip
        return self.constant(held, self.result(held))

    def constant(self, tensor: torch.Tensor, result: NodeResult) -> Value:
        value = self.b.constant(tensor, result.shape, result.dtype)
        self.layouts[value] = Layout(result.strides)
        return value

    def result(self, t: torch.Tensor) -> NodeResult:
        strides = self.symbols.shape(t.stride()) if t.layout is torch.strided else ()
        return NodeResult(self.symbols.shape(t.shape), to_dtype(t.dtype), strides)

    def call(self, node: fx.Node) -> object:
        target = node.target
        if target is operator.getitem:
            return self.item(node)
        val = node.meta.get("val")
        if isinstance(val, NUMBERS) and not isinstance(target, HigherOrderOperator):
            return self.number(node, val)
        name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else str(target)
        if name in _DROPPED:
            return None
        if name == "copy_" and node.args[0] in self.places:
            return self.write(node)
        if name == "_assert_scalar":
            return self.assertion(node)
        with self.b.origin(display_name(target), place_of(node), node.name) as origin:
            return self.compute(node, origin, val)

    def item(self, node: fx.Node) -> object:
        source, index = self.argument(node.args[0]), node.args[1]
        if not isinstance(source, tuple) or not isinstance(index, int):
            raise UnsupportedError(
                "an item of something that is not a tuple", phase="capture", place=place_of(node)
            )
        return source[index]

    def number(self, node: fx.Node, val: object) -> Expr:
        """A host scalar. Reading it out of a tensor binds its symbol."""
        assert isinstance(val, NUMBERS)
        made = self.symbols.expr(val)
        if node.target in _DIVISIONS and isinstance(by := self.argument(node.args[1]), Expr):
            with self.b.origin(display_name(node.target), place_of(node), node.name):
                self.b.require_divisor(by)
        sources = [a for a in node.all_input_nodes if isinstance(self.entries[a], Value)]
        target = node.target
        if isinstance(target, OpOverload) and sources and "sym_" not in target.overloadpacket.__name__:
            claimed = self.claimed(val, made)
            bound = made if claimed is None else claimed
            with self.b.origin(display_name(target), place_of(node), node.name) as origin:
                call, inputs = self.library(node, (), library_reason(target))
                self.b.library(call, inputs, (), binds=(bound,))
                self.b.close_origin(origin, call, inputs, ())
            if claimed is not None:
                self.hold(made, claimed)
        return made

    def claimed(self, val: SymbolicNumber, made: Expr) -> Expr | None:
        """The symbol of a number that is read, where the program goes on with what it claims the number to be."""
        told = self.claims.own(val)
        if told is None or told.value == made.value or made.dtype is not told.dtype:
            return None
        calls = [(op.outputs, op.binds) for op in self.b.ops if op.call is not None]
        return told if symbols_in(made) <= symbols_in((self.inputs, calls)) else None

    def hold(self, made: Expr, claimed: Expr) -> None:
        """Check what the program claims of a number: torch takes out checks that the claim fulfils."""
        check = torch.ops.aten._assert_scalar.default
        said = f"a number is {made} in this program, and something else was read"
        call = LibraryCall(
            display_name(check), check, (expr_call("eq", claimed, made), said), reason=CHECK, pure=False
        )
        self.b.library(call, (), ())

    def assertion(self, node: fx.Node) -> None:
        """A check of host scalars, unless it is known to hold without itself."""
        tested = node.args[0]
        val = tested.meta.get("val") if isinstance(tested, fx.Node) else tested
        made = self.claims.expr(val) if isinstance(val, NUMBERS) else self.argument(tested)
        if made is True or (isinstance(made, Expr) and made.op == "const" and bool(made.value)):
            return
        with self.b.origin(display_name(node.target), place_of(node), node.name) as origin:
            call, inputs = self.library(node, (), CHECK)
            call = replace(call, args=(made, *call.args[1:]), pure=False)
            self.b.library(call, inputs, ())
            self.b.close_origin(origin, call, inputs, ())

    def write(self, node: fx.Node) -> Value:
        target, source = node.args[0], self.argument(node.args[1])
        assert isinstance(target, fx.Node) and isinstance(source, Value)
        old = self.entries[target]
        assert isinstance(old, Value)
        if source.dtype != old.dtype or source.shape != old.shape:
            with self.b.origin("copy_", place_of(node), node.name):
                source = pointwise.to(self.b, source, old.dtype)
                source = pointwise.pointwise(self.b, "copy", lambda _, e: e, old, source)
        self.writes.append(Write(self.places[target], source))
        return source

    def argument(self, a: object) -> object:
        """An argument with captured nodes replaced by what they became."""
        if isinstance(a, fx.Node):
            found = self.entries.get(a, _MISSING)
            if found is _MISSING:
                raise VerifyError(f"{a.name} is used before it is made", phase="capture")
            return plain_number(found)
        if isinstance(a, (list, tuple)):
            items = [self.argument(x) for x in a]
            return tuple(items) if isinstance(a, tuple) else items
        if isinstance(a, dict):
            return {k: self.argument(x) for k, x in a.items()}
        return a

    def compute(self, node: fx.Node, origin: int, val: object) -> object:
        """The declaration of the node's op if it has one, else its library call."""
        if node.target is loop_op:
            return self.loop(node, origin)
        if quantised := quantised_types(node):
            raise UnsupportedError(
                f"a result of type {quantised[0]}", phase="capture", op=display_name(node.target), place=place_of(node),
                hint="the decomposed form of quantisation, of plain integers, is compiled",
            )  # fmt: skip
        metas, nested = leaves_of(val)
        results = [self.result(t) if isinstance(t, torch.Tensor) else None for t in metas]
        entry = entry_of(node.target)
        reason = library_reason(node.target)
        made: tuple[object, ...] | None = None
        replacement: ReplacementCall | None = None
        if entry is not None and refuses_types(node):
            reason = "types that eager mode refuses"
        elif entry is not None and not nested:
            mark = len(self.b.ops)
            try:
                made, replacement = self.declared(node, entry, results)
            except NoDeclaration as refused:
                reason = refused.reason
                del self.b.ops[mark:]
        declared = entry if made is not None else None
        strides = [r.strides for r in results if r is not None]
        call, inputs = self.library(
            node, strides, reason if declared is None else declared.reason, replacement
        )
        added = call.args[declared.bias] if declared is not None and declared.bias >= 0 else None
        if isinstance(added, Operand) and added.index == len(inputs) - 1:
            call = replace(call, bias=added.index, channel=1)
        if results[0] is not None and (len(results) == 1 or used_results(node) <= {0}):
            task = task_of(node.target, call, inputs, results[0].shape, repeated=self.repeated)
            call = replace(call, task=task)
        alone = self.standing_alone(node)
        relies = made is None or bool(by_place(node)) or call.reason not in _TAKES_ANY
        call = self.with_strides(node, call, inputs, relies=relies)
        if made is None:
            if not alone:
                raise UnsupportedError(
                    "a storage of which the graph has no more than a part", phase="capture", op=call.name,
                    place=place_of(node),
                )  # fmt: skip
            self.check_device(node, metas)
            made = self.called(call, inputs, results, metas)
            call = self.b.ops[-1].call or call
        placed = self.memory.placed(node)
        if placed is not None and placed[0] in self.places:
            self.placed[self.places[placed[0]]] = placed[1].offset
        outputs = [v for v in made if isinstance(v, Value)]
        if declared is not None:
            places = [k for k, v in enumerate(made) if isinstance(v, Value)]
            strides = tuple(r.strides for k in places if (r := results[k]) is not None)
            call = replace(call, places=tuple(places), strides=strides)
        is_view = declared is not None and declared.view
        self.b.close_origin(origin, call if alone else None, inputs, outputs, view=is_view)
        return shaped_like(val, iter(made))

    def loop(self, node: fx.Node, origin: int) -> tuple[object, ...]:
        """A loop, whose body becomes a graph of its own."""
        held, steps, going, stacked, backwards, *given = map(self.argument, node.args)
        assert isinstance(held, fx.GraphModule) and isinstance(stacked, int)
        body = from_fx(held, ranges=self.ranges, repeated=True)
        results = [self.result(t) for t in node.meta["val"]]
        call, inputs = loop_call(held, body, (steps, going, stacked, backwards), given)
        call = replace(call, strides=tuple(r.strides for r in results))
        made = self.b.library(call, inputs, [(r.shape, r.dtype) for r in results])
        self.b.close_origin(origin, call, inputs, made)
        return made

    def with_strides(
        self, node: fx.Node, call: LibraryCall, inputs: Sequence[Value], *, relies: bool
    ) -> LibraryCall:
        """`call` with how its operands lie in the program, and whether it relies on that."""
        strides = self.memory.strides_of(node, inputs)
        packs = isinstance(call.task, (Product, Convolution)) and call.task.dtype is f32
        takes_any = packs and call.reason in _TAKES_ANY
        if relies and not takes_any:
            function = any_strides(call.function) if None in strides else call.function
            assert callable(function)
            return replace(call, function=function, lies=strides, apart=bool(by_place(node)))
        return replace(call, seen=strides)

    def standing_alone(self, node: fx.Node) -> bool:
        """Whether the node's call computes the same from its operands' elements, strides and offsets alone."""
        read = (n for n in by_place(node) if isinstance(self.entries[n], Value))
        return all(self.memory.fills(n) for n in read)

    def check_device(self, node: fx.Node, metas: Sequence[object]) -> None:
        """A call must leave its results where kernels look for them."""
        for t in metas:
            if isinstance(t, torch.Tensor) and str(t.device) != self.device:
                raise UnsupportedError(
                    f"a result on {t.device} in a graph on {self.device}", phase="capture",
                    op=display_name(node.target), place=place_of(node),
                )  # fmt: skip

    def declared(
        self, node: fx.Node, entry: OpEntry, results: Sequence[NodeResult | None]
    ) -> tuple[tuple[object, ...], ReplacementCall | None]:
        tensors = [r for r in results if r is not None]
        args = [self.argument(a) for a in node.args]
        kwargs = {k: self.argument(a) for k, a in node.kwargs.items()}
        read = [r for k, r in enumerate(results) if r is not None and k in used_results(node)] or tensors
        opaque = [t.dtype for t in (*values_in((args, kwargs)), *read) if t.dtype.kind is Kind.OPAQUE]
        if opaque:
            raise NoDeclaration("complex" if "complex" in opaque[0].name else f"type {opaque[0]}")
        shapes = tuple(r.shape for r in tensors)
        call = Call(
            self.b, tuple(r.dtype for r in tensors), used_results(node), shapes, NodeMemory(self.memory, node)
        )
        try:
            out = entry.rule(call, *args, **kwargs)
        except (ValueError, AssertionError) as bad:
            raise VerifyError(
                str(bad), phase="capture", op=display_name(node.target), place=place_of(node)
            ) from bad
        made = out if isinstance(out, tuple) else (out,)
        made += (None,) * (len(results) - len(made))  # results that are no tensors, behind those that are
        agreed = (
            v if v is None or r is None else self.agreed(node, v, r)
            for v, r in zip(made, results, strict=True)
        )
        return tuple(agreed), call.replacement

    def agreed(self, node: fx.Node, v: Value, r: NodeResult) -> Value:
        """A declaration's result, of torch's sizes where they are 1 in each call. See `agree`."""
        ones = self.symbols.ones()
        seen = [
            dims.ONE if theirs is dims.ONE and ours in ones else ours
            for ours, theirs in zip(v.shape, r.shape, strict=False)
        ]
        if len(v.shape) == len(r.shape) and tuple(seen) != v.shape:
            v = access(self.b, "squeeze", v, seen, lambda i: i)
        agree(node, v, r)
        return v

    def library(
        self,
        node: fx.Node,
        strides: Sequence[tuple[Expr, ...]],
        reason: str,
        replacement: ReplacementCall | None = None,
    ) -> tuple[LibraryCall, list[Value]]:
        """The call of the torch op itself, or a `replacement`, and the tensors it reads."""
        inputs: list[Value] = []
        target = library_target(node.target) if replacement is None else replacement.function

        def hide(a: object) -> object:
            if isinstance(a, Value):
                if a not in inputs:
                    inputs.append(a)
                return Operand(inputs.index(a))
            if isinstance(a, (list, tuple)):
                items = [hide(x) for x in a]
                return tuple(items) if isinstance(a, tuple) else items
            return a

        given, named = (
            (node.args, node.kwargs) if replacement is None else (replacement.args, replacement.kwargs)
        )
        args = tuple(hide(self.argument(a)) for a in given)
        kwargs = tuple((k, hide(self.argument(a))) for k, a in named.items())
        assert callable(target)
        pure = (
            not (isinstance(target, OpOverload) and target._schema.is_mutable)  # pyright: ignore[reportPrivateUsage]
            and reason != "random"
        )
        group = collective(target, args, dict(kwargs))
        if node.is_impure() or group is not None:
            pure = False
        call = LibraryCall(display_name(target), target, args, kwargs, tuple(strides), reason, pure)
        call = replace(call, over=in_place_of(target), line=line_of(target, args, inputs))
        if group is not None:
            call = replace(call, group=group, starts=bool(group), reuses=-1 if group else 0)
        return call, inputs

    def called(
        self,
        call: LibraryCall,
        inputs: list[Value],
        results: Sequence[NodeResult | None],
        metas: Sequence[object],
    ) -> tuple[object, ...]:
        """What an op made that runs as `call`: a value per tensor, an expression per host scalar, in their places."""
        numbers = {k: self.symbols.expr(m) for k, m in enumerate(metas) if isinstance(m, NUMBERS)}
        binds = {k: e for k, e in numbers.items() if e.op == "symbol"}
        tensors = {k: r for k, r in enumerate(results) if r is not None}
        call = replace(call, places=(*tensors, *binds))
        given = [(r.shape, r.dtype) for r in tensors.values()]
        values = self.b.library(call, inputs, given, binds=tuple(binds.values()))
        made: dict[int, object] = dict(zip(tensors, values, strict=True))
        return tuple(made.get(k, numbers.get(k)) for k in range(len(metas)))

    def finish(self, node: fx.Node) -> Graph:
        (returned,) = node.args
        outputs: list[Value | Expr | None] = []
        forms: list[Layout | None] = []
        for a in returned if isinstance(returned, (list, tuple)) else (returned,):
            entry = self.argument(a)
            if isinstance(entry, Value):
                assert isinstance(a, fx.Node)
                kind = a.meta["val"].layout
                if kind is not torch.strided:
                    raise UnsupportedError(
                        f"a result of layout {kind}", phase="capture", op=display_name(a.target), place=place_of(a),
                        hint="dense results are compiled",
                    )  # fmt: skip
                layout = Layout(self.result(a.meta["val"]).strides)
                self.layouts.setdefault(entry, layout)
                forms += [None] * (len(outputs) - len(forms)) + [layout]
                outputs.append(entry)
            elif isinstance(entry, NUMBERS):
                outputs.append(self.symbols.expr(entry))
            elif entry is None or isinstance(entry, Expr):
                outputs.append(entry)
            else:
                raise UnsupportedError(f"an output of type {type(entry).__name__}", phase="capture")
        try:
            graph = self.b.finish(self.inputs, outputs)
        except ValueError as bad:
            raise VerifyError(str(bad), phase="capture") from bad
        forms += [None] * (len(outputs) - len(forms)) if forms else []
        places = tuple(self.placed.items())
        writes = tuple(self.writes)
        return replace(graph, layouts=self.layouts, writes=writes, returned=tuple(forms), placed=places)


__all__ = ["from_fx"]
