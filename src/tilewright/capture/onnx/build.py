"""From the nodes of a model to the steps of a program.

Every value has a kind known at load time: CONST (a tensor), TENSOR, or MAYBE (host numbers or a tensor, seen only
when the model runs). Nodes over constants are folded, function bodies inlined, branches with a constant condition
resolved; what is left becomes one step per node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto
from torch import Tensor

from tilewright.capture.onnx.values.run import TooLarge, Value, as_host, as_tensor, size_limit
from tilewright.capture.onnx.values.traced import Subgraph, Val, ValueKind
from tilewright.errors import ModelError, TilewrightError, UnsupportedError
from tilewright.tuning.input_limits import MODEL_FILES

from .nodes import (
    attribute_kinds,
    check_arity,
    is_small_on_meta,
    is_surely_small,
    label_of,
    opset_table,
    schema_body,
)
from .program import (
    Convert,
    OnnxProgram,
    OnnxStep,
    convert_host,
    convert_scalar,
    convert_tensor,
    host_call,
    prune,
    scalar_call,
    tensor_call,
)
from .proto import NARROW, tensor_of
from .refuse import completed, refused
from .registry import EXTRAS, OpDef, lookup, lookup_host

_TAKES_NARROW = frozenset({"DequantizeLinear", "Cast"})
_CPU = torch.device("cpu")


@dataclass
class Context:
    """What all builders of one model share."""

    folder: Path | None
    functions: Mapping[tuple[str, str, str], FunctionProto]
    control: Mapping[tuple[str, str], ControlBuilder]
    constants: list[tuple[Val, int]] = field(default_factory=list)
    data_dependent: list[str] = field(default_factory=list)
    nodes: int = 0


@dataclass
class NameScope:
    """Names visible to a list of nodes; `opsets` gives the versions in force."""

    builder: ProgramBuilder
    opsets: Mapping[str, int]
    parent: NameScope | None = None
    names: dict[str, Val | None] = field(default_factory=dict)
    attributes: Mapping[str, AttributeProto] | None = None
    depth: int = 0

    def find(self, name: str, place: str) -> Val | None:
        """The value of a name; None for an absent optional input; ModelError if nothing defines it."""
        if not name:
            return None
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        raise ModelError(
            f"input {name!r} is not defined before its use",
            phase="capture",
            place=place,
            hint="is the file intact?",
        )


class ProgramBuilder:
    """Collects the steps of one program. `parent` is the builder of the enclosing program, if any."""

    def __init__(self, context: Context, parent: ProgramBuilder | None = None) -> None:
        self.context = context
        self.parent = parent
        self.template: list[object] = [None, None]  # slot 0: device, slot 1: absent optional
        self.steps: list[OnnxStep] = []
        self.captures: list[tuple[int, int]] = []
        self._local: dict[int, int] = {}
        self._shared: list[object] = []
        self._mark = len(context.data_dependent)

    # slots

    def new_slot(self, content: object = None) -> int:
        """A fresh slot, with a value that never changes if `content` is given."""
        self.template.append(content)
        return len(self.template) - 1

    def slot_of(self, val: Val) -> int:
        """Where this program finds `val`: its own slot, a constant, or a value captured from outside."""
        if val.owner is self:
            return val.slot
        key = id(val)
        if key not in self._local:
            slot = self.new_slot()
            self._local[key] = slot
            self._shared.append(val)
            if self.parent is not None:
                self.captures.append((self.parent.slot_of(val), slot))
            else:
                self.context.constants.append((val, slot))
        return self._local[key]

    def value(self, kind: ValueKind) -> Val:
        """A new value made by this program."""
        return Val(kind, self, self.new_slot())

    # nodes

    def add_nodes(self, nodes: Iterable[NodeProto], scope: NameScope) -> None:
        """Add nodes in order; their outputs enter `scope`."""
        for index, node in enumerate(nodes):
            self.context.nodes += 1
            if self.context.nodes > MODEL_FILES.max_nodes:
                raise ModelError(f"more than {MODEL_FILES.max_nodes} nodes", phase="capture")
            try:
                self.add_node(node, scope, index)
            except TilewrightError as error:
                raise completed(error, label_of(node, index))  # noqa: B904  (the same error)

    def add_node(self, node: NodeProto, scope: NameScope, index: int) -> None:
        """Resolve one node: constant, control flow, own function, function body, in that order."""
        label = label_of(node, index)
        domain = "" if node.domain == "ai.onnx" else node.domain
        vals = [scope.find(name, label) for name in node.input]
        local = self.context.functions.get((domain, node.op_type, getattr(node, "overload", "")))
        if local is not None:
            outs = self.inline(local, node, vals, scope, label)
        else:
            version = scope.opsets.get(domain)
            if version is None:
                raise ModelError(f"no version of domain {domain!r} imported", phase="capture", place=label)
            if (domain, node.op_type) in self.context.control:
                outs = self.context.control[domain, node.op_type](self, node, vals, scope, label)
            else:
                outs = self.add_operator(node, domain, version, vals, scope, label)
        for name, val in zip(node.output, outs, strict=False):
            if name and name in scope.names:
                raise ModelError(f"{name!r} is defined twice", phase="capture", place=label)
            if name:
                scope.names[name] = val

    def add_operator(
        self, node: NodeProto, domain: str, version: int, vals: list[Val | None], scope: NameScope, label: str
    ) -> list[Val | None]:
        """One node with an entry in the table, or with a function body in the standard."""
        entry = lookup(domain, node.op_type, version)
        if entry is None:
            found = schema_body(node, domain, version)
            if found is not None:
                return self.inline(found[0], node, vals, scope, label, found[1])
            raise UnsupportedError(
                f"operator {node.op_type} of domain {domain or 'ai.onnx'!r}, opset {version}, is not supported",
                phase="capture",
                op=node.op_type,
                place=label,
                hint="export the model with standard operators, or give this one a function body",
            )
        keywords = self.keywords(node, entry, version, scope, label)
        check_arity(entry, vals, keywords, label)
        if entry.name not in _TAKES_NARROW and any(v is not None and v.narrow for v in vals):
            raise UnsupportedError(
                "integers below one byte are only supported as weights of DequantizeLinear",
                phase="capture",
                op=entry.name,
                place=label,
                hint="dequantise the weight first, or store it as int8",
            )
        constant = all(v is None or v.kind is ValueKind.CONST for v in vals)
        if constant and entry.pure:
            folded = self.fold(entry, keywords, vals, len(node.output), label)
            if folded is not None and folded[0] is not None and entry.name == "Constant":
                folded[0].narrow = any(a.t.data_type in NARROW for a in node.attribute)
            if folded is not None:
                return folded
        return self.emit(entry, keywords, vals, len(node.output), label)

    def keywords(
        self, node: NodeProto, entry: OpDef, version: int, scope: NameScope, label: str
    ) -> dict[str, object]:
        """The node's attributes as keyword arguments, plus the extras that the function asks for."""
        result: dict[str, object] = {}
        kinds = attribute_kinds(node, version)
        for attribute in node.attribute:
            attribute = self.resolve(attribute, scope)
            if attribute is None:
                continue
            if attribute.name not in entry.names or attribute.name in EXTRAS:
                raise UnsupportedError(
                    f"attribute {attribute.name!r} of {node.op_type} (opset {version}) is not supported",
                    phase="capture",
                    op=node.op_type,
                    place=label,
                    hint="is the attribute part of the standard at this opset?",
                )
            if attribute.type != kinds.get(attribute.name, attribute.type):
                kind = AttributeProto.AttributeType.Name(kinds[attribute.name])
                raise ModelError(f"attribute {attribute.name!r} must be of type {kind}", phase="capture")
            result[attribute.name] = self.attribute_value(attribute, node.op_type, label)
        if "outputs" in entry.names:
            result["outputs"] = len(node.output)
        if "opset" in entry.names:
            result["opset"] = version
        return result

    def resolve(self, attribute: AttributeProto, scope: NameScope) -> AttributeProto | None:
        """An attribute of a function body may stand for one of the caller's; None when that is absent."""
        if not attribute.ref_attr_name:
            return attribute
        found = (scope.attributes or {}).get(attribute.ref_attr_name)
        if found is None:
            return None
        copy = AttributeProto()
        copy.CopyFrom(found)
        copy.name = attribute.name
        return copy

    def attribute_value(self, attribute: AttributeProto, op_type: str, label: str) -> object:
        """A python value: number, str, tuple, tensor, or host value for a tensor of one element."""
        if attribute.type == AttributeProto.TENSOR:
            tensor = tensor_of(attribute.t, self.context.folder)
            return as_host(tensor) if tensor.numel() == 1 and op_type != "Constant" else tensor
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            raise ModelError(
                f"attribute {attribute.name!r} must not be a graph", phase="capture", place=label
            )
        try:
            value = onnx.helper.get_attribute_value(attribute)
        except ValueError as error:
            raise ModelError(
                f"attribute {attribute.name!r}: {error}", phase="capture", place=label
            ) from error
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, (int, float, str, onnx.TypeProto)):
            return value
        if isinstance(value, Sequence):
            return tuple(v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in value)
        raise UnsupportedError(
            f"attribute {attribute.name!r} has an unsupported type",
            phase="capture",
            place=label,
            hint="see the op",
        )

    # folding and emitting

    def fold(
        self,
        entry: OpDef,
        keywords: Mapping[str, object],
        vals: Sequence[Val | None],
        outputs: int,
        label: str,
    ) -> list[Val | None] | None:
        """Evaluate a node over constants now; None when its outputs are too large to keep or not tensors."""
        args: list[Value] = []
        for i, val in enumerate(vals):
            args.append(None if val is None else val.host() if i in entry.host else val.const)
        if "device" in entry.names:
            keywords = {**keywords, "device": _CPU}
        try:
            with torch.no_grad(), size_limit(MODEL_FILES.max_folded_bytes):
                if not is_surely_small(args) and not is_small_on_meta(entry, args, keywords):
                    return None
                result = entry.function(*args, **keywords)
        except TooLarge:
            return None
        except TilewrightError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise refused(error, label) from error
        items = result if isinstance(result, tuple) else (result,)
        consts = [as_tensor(item, _CPU) for item in items[:outputs]]
        if any(c is not None and not isinstance(c, Tensor) for c in consts):
            return None
        size = sum(c.numel() * c.element_size() for c in consts if isinstance(c, Tensor))
        if size > MODEL_FILES.max_folded_bytes:
            return None
        return [
            Val(ValueKind.CONST, const=c.detach().contiguous()) if isinstance(c, Tensor) else None
            for c in consts
        ]

    def emit(
        self,
        entry: OpDef,
        keywords: Mapping[str, object],
        vals: Sequence[Val | None],
        outputs: int,
        label: str,
    ) -> list[Val | None]:
        """One step: the function with its attributes bound, behind the conversions that its inputs need."""
        surely = any(v.kind is ValueKind.TENSOR for v in vals if v is not None)
        host_function = None if surely else lookup_host(entry.domain, entry.name)
        at_host = [v for i, v in enumerate(vals) if v is not None and i in entry.host]
        reads = any(v.kind is ValueKind.TENSOR for v in at_host)
        if reads or entry.reads_data(keywords):
            self.context.data_dependent.append(label)
        ins: list[int] = []
        converts: list[Convert | None] = []
        number = _scalar_position(entry, vals)
        for i, val in enumerate(vals):
            on_host = i in entry.host or (i in entry.small and _is_single(val))
            slot, convert = self._operand(val, on_host, i == number, host_function is not None)
            ins.append(slot)
            converts.append(convert)
        call: Callable[..., object] = partial(entry.function, **keywords) if keywords else entry.function
        if number is not None:
            operand = vals[number]
            assert operand is not None
            if operand.kind is ValueKind.CONST and operand.const is not None and operand.const.dim() > 0:
                call = scalar_call(call, operand.const.dim(), number)
        wants_device = "device" in entry.names
        converted = wants_device or host_function is not None or any(c is not None for c in converts)
        if converted:
            call = tensor_call(call, converts, wants_device)
        if host_function is not None:
            call = host_call(partial(host_function, **keywords), call)
        kind = ValueKind.MAYBE if entry.gives_host or host_function is not None else ValueKind.TENSOR
        outs = [self.value(kind) for _ in range(outputs)]
        self.add_step(call, ([0] if converted else []) + ins, outs, label, order_strides=not entry.view)
        return list(outs)

    def _operand(
        self, val: Val | None, on_host: bool, number: bool, dynamic: bool
    ) -> tuple[int, Convert | None]:
        """The slot and the conversion of one operand."""
        if val is None:
            return 1, None
        if on_host:
            if val.kind is ValueKind.CONST:
                return self.new_slot(val.host()), None
            return self.slot_of(val), convert_host
        if val.kind is ValueKind.CONST:
            assert val.const is not None
            if number:
                return self.new_slot(val.host().item()), None
            if dynamic and val.const.numel() <= MODEL_FILES.max_host_constant_elements:
                return self.new_slot(val.host()), convert_tensor
            return self.slot_of(val), None
        if val.kind is ValueKind.MAYBE:
            return self.slot_of(val), convert_scalar if number else convert_tensor
        return self.slot_of(val), None

    def add_step(
        self,
        call: Callable[..., object],
        ins: Sequence[int],
        outs: Sequence[Val],
        label: str,
        order_strides: bool = False,
    ) -> None:
        """Append one step. It takes over the data-dependent nodes noted since the last one."""
        data = tuple(self.context.data_dependent[self._mark :])
        self._mark = len(self.context.data_dependent)
        maybe = any(v.kind is ValueKind.MAYBE for v in outs)
        self.steps.append(
            OnnxStep(call, tuple(ins), tuple(v.slot for v in outs), (), label, order_strides, maybe, data)
        )

    # bodies

    def inline(
        self,
        function: FunctionProto,
        node: NodeProto,
        vals: list[Val | None],
        scope: NameScope,
        label: str,
        defaults: Mapping[str, AttributeProto] | None = None,
    ) -> list[Val | None]:
        """The body of a function in place of the node that calls it."""
        if scope.depth >= MODEL_FILES.max_depth:
            raise ModelError(
                f"functions nest deeper than {MODEL_FILES.max_depth}", phase="capture", place=label
            )
        attributes = {**(defaults or {}), **{a.name: a for a in function.attribute_proto}}
        for attribute in node.attribute:
            resolved = self.resolve(attribute, scope)
            if resolved is not None:
                attributes[attribute.name] = resolved
        opsets = opset_table(function.opset_import) or dict(scope.opsets)
        inner = NameScope(self, opsets, attributes=attributes, depth=scope.depth + 1)
        for i, name in enumerate(function.input):
            inner.names[name] = vals[i] if i < len(vals) else None
        self.add_nodes(function.node, inner)
        return [inner.find(name, label) for name in function.output]

    def subgraph(
        self, graph: GraphProto, scope: NameScope, formals: Sequence[ValueKind]
    ) -> tuple[Subgraph, list[int], list[ValueKind]]:
        """A body as its own program. Returns it, the slots that it captures here, the kinds of its outputs.

        `formals` are the kinds of the body's inputs: TENSOR ones must be given tensors.
        """
        if len(graph.input) != len(formals):
            raise ModelError(f"a body has {len(graph.input)} inputs, not {len(formals)}", phase="capture")
        inner = ProgramBuilder(self.context, self)
        body_scope = NameScope(inner, scope.opsets, scope, {}, scope.attributes, scope.depth + 1)
        if body_scope.depth > MODEL_FILES.max_depth:
            raise ModelError(f"bodies nest deeper than {MODEL_FILES.max_depth}", phase="capture")
        inputs = [inner.value(kind) for kind in formals]
        for value_info, val in zip(graph.input, inputs, strict=True):
            body_scope.names[value_info.name] = val
        add_initialisers(graph, body_scope)
        inner.add_nodes(graph.node, body_scope)
        results = [body_scope.find(o.name, graph.name) for o in graph.output]
        program = inner.finish([v.slot for v in inputs], results)
        kinds = [ValueKind.CONST if r is None else r.kind for r in results]
        captured = [outer for outer, _ in inner.captures]
        return Subgraph(program, len(captured)), captured, kinds

    def finish(self, inputs: Sequence[int], results: Sequence[Val | None]) -> OnnxProgram:
        """Drop steps that nobody reads, note where values die, freeze."""
        outputs = [1 if r is None else self._result_slot(r) for r in results]
        all_inputs = (*inputs, *(local for _, local in self.captures))
        return OnnxProgram(
            tuple(self.template), tuple(all_inputs), tuple(outputs), prune(self.steps, outputs)
        )

    def _result_slot(self, val: Val) -> int:
        if (
            val.kind is ValueKind.CONST
            and self.parent is not None
            and val.const is not None
            and val.const.numel() <= 16
        ):
            return self.new_slot(val.host())
        return self.slot_of(val)


def _is_single(val: Val | None) -> bool:
    return val is not None and val.const is not None and val.const.numel() == 1


def _scalar_position(entry: OpDef, vals: Sequence[Val | None]) -> int | None:
    """The position whose operand may become a plain number: the other operand must be a tensor."""
    if len(vals) != 2 or not entry.scalar:
        return None
    for i in sorted(entry.scalar, reverse=True):
        val, other = vals[i], vals[1 - i]
        if val is None or other is None or other.kind is not ValueKind.TENSOR:
            continue
        if val.kind is ValueKind.MAYBE:
            return i
        if val.kind is ValueKind.CONST and val.const is not None and val.const.numel() == 1:
            return i
    return None


ControlBuilder = Callable[[ProgramBuilder, NodeProto, list["Val | None"], NameScope, str], list["Val | None"]]
"""Adds one control flow node: (builder, node, inputs, scope, label) to its outputs."""


def add_initialisers(graph: GraphProto, scope: NameScope) -> None:
    """Enter the constants of a graph into its scope."""
    folder = scope.builder.context.folder
    if graph.sparse_initializer:
        raise UnsupportedError(
            "sparse initialisers", phase="capture", place=graph.name, hint="make them dense"
        )
    for proto in graph.initializer:
        if proto.name in scope.names:
            raise ModelError(f"two initialisers are named {proto.name!r}", phase="capture", place=graph.name)
        narrow = proto.data_type in NARROW
        scope.names[proto.name] = Val(ValueKind.CONST, const=tensor_of(proto, folder), narrow=narrow)
