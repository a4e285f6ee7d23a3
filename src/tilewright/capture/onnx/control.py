"""`If`, `Loop`, `Scan` and `SequenceMap`: bodies become programs of their own, run by plain python control flow.

A branch or trip count that is constant or comes from sizes is decided while torch captures; one that depends on
data is read when the model runs, and its node is listed in `data_dependent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from onnx import AttributeProto, GraphProto, NodeProto
from torch import Tensor

from tilewright.capture.onnx.ops.attention import flex_attention
from tilewright.capture.onnx.values.run import Host, Value, as_tensor, scalar, sym_max, torch_dtype
from tilewright.capture.onnx.values.traced import Subgraph, Val, ValueKind
from tilewright.errors import ModelError, UnsupportedError
from tilewright.tuning.input_limits import LOOP_LIMITS, MODEL_FILES

from .build import ControlBuilder, NameScope, ProgramBuilder, add_initialisers
from .looped import OnnxSteps, Operands, becomes_one_op, looped


def _graph(node: NodeProto, name: str, label: str) -> GraphProto:
    for attribute in node.attribute:
        if attribute.name == name and attribute.type == AttributeProto.GRAPH:
            return attribute.g
    raise ModelError(f"attribute {name!r} is missing", phase="capture", op=node.op_type, place=label)


def _int(node: NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _ints(node: NodeProto, name: str, count: int, default: int = 0) -> list[int]:
    values = next((list(a.ints) for a in node.attribute if a.name == name), [])
    return values if values else [default] * count


def read_flag(value: Value) -> bool:
    """A condition as a python bool; reads data if it is a tensor."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ModelError(f"a condition of shape {list(value.shape)}", phase="capture")
        return bool(value.reshape(()).item())
    assert isinstance(value, Host)
    return bool(value.item())


def read_count(value: Value) -> int:
    """A trip count as a python int; reads data if it is a tensor."""
    if isinstance(value, Tensor):
        return int(value.reshape(()).item())
    assert isinstance(value, Host)
    return int(value.int())


def _operand_slot(builder: ProgramBuilder, val: Val | None) -> int:
    """The slot of a carried value: small integer constants enter as host values."""
    if val is None:
        return 1
    return builder.new_slot(val.host()) if _is_small_integer(val) else builder.slot_of(val)


def _run_if(
    then: Subgraph, other: Subgraph, tensors: bool, device: torch.device, flag: Value, *captured: Value
) -> object:
    if read_flag(flag):
        results = then.program.run(device, captured[: then.captures])
    else:
        results = other.program.run(device, captured[then.captures :])
    return tuple(as_tensor(r, device) for r in results) if tensors else results


def build_if(
    builder: ProgramBuilder, node: NodeProto, vals: list[Val | None], scope: NameScope, label: str
) -> list[Val | None]:
    """A constant condition inlines its branch; another becomes a step with two programs."""
    flag = vals[0]
    if flag is None:
        raise ModelError("the condition is missing", phase="capture", op="If", place=label)
    branches = [_graph(node, name, label) for name in ("then_branch", "else_branch")]
    if flag.kind is ValueKind.CONST:
        graph = branches[0] if bool(flag.host().item()) else branches[1]
        inner = NameScope(builder, scope.opsets, scope, {}, scope.attributes, scope.depth + 1)
        add_initialisers(graph, inner)
        builder.add_nodes(graph.node, inner)
        return [inner.find(o.name, label) for o in graph.output]
    listed = len(builder.context.data_dependent)
    if flag.kind is ValueKind.TENSOR:
        builder.context.data_dependent.append(label)
    then, then_slots, then_kinds = builder.subgraph(branches[0], scope, [])
    other, other_slots, other_kinds = builder.subgraph(branches[1], scope, [])
    if not len(then_kinds) == len(other_kinds) >= len(node.output):
        raise ModelError("the branches have different outputs", phase="capture", op="If", place=label)
    tensors = len(builder.context.data_dependent) > listed
    outs = [
        builder.value(ValueKind.TENSOR if tensors or a is b is ValueKind.TENSOR else ValueKind.MAYBE)
        for a, b in zip(then_kinds[: len(node.output)], other_kinds, strict=False)
    ]
    ins = [0, builder.slot_of(flag), *then_slots, *other_slots]
    builder.add_step(partial(_run_if, then, other, tensors), ins, outs, label)
    return list(outs)


@dataclass(frozen=True)
class OnnxLoopBody:
    """The body of a `Loop`: the kinds of its carried values, what it declares of its scan outputs, and whether carried
    values leave the loop as tensors; `label` names the node."""

    body: Subgraph
    formals: tuple[ValueKind, ...]
    elements: tuple[Element, ...]
    tensors: bool
    label: str


def _run_loop(loop: OnnxLoopBody, device: torch.device, trips: Value, flag: Value, *rest: Value) -> object:
    body, formals, elements = loop.body, loop.formals, loop.elements

    def as_tensors(values: Sequence[Value]) -> list[Value]:
        """Values whose formal is a tensor as tensors."""
        return [
            as_tensor(v, device) if k is ValueKind.TENSOR else v for v, k in zip(values, formals, strict=True)
        ]

    carried = len(formals)
    state, captured = as_tensors(rest[:carried]), rest[carried:]
    made = _loop_as_op(loop, device, trips, flag, state, captured)
    if made is not None:
        return made
    limit = None if trips is None else read_count(trips)
    going = True if flag is None else read_flag(flag)
    count, cap = 0, MODEL_FILES.max_unrolled_steps if torch.compiler.is_compiling() else LOOP_LIMITS.max_steps
    scans: list[list[Value]] = [[] for _ in elements]
    while going and (limit is None or count < limit):
        if count >= cap:
            raise UnsupportedError(
                f"a loop runs more than {cap} times",
                phase="capture",
                op="Loop",
                place=loop.label,
                hint="run the model eagerly, or lower its trip count",
            )
        results = body.program.run(device, [scalar(count), scalar(going, torch.bool), *state, *captured])
        going = read_flag(results[0])
        state = as_tensors(results[1 : 1 + carried])
        for scan, value in zip(scans, results[1 + carried :], strict=True):
            scan.append(as_tensor(value, device))
        count += 1
    stacked = [_stack(s, 0, False, e, device) for s, e in zip(scans, elements, strict=True)]
    return (*[as_tensor(v, device) if loop.tensors else v for v in state], *stacked)


def _loop_as_op(
    loop: OnnxLoopBody,
    device: torch.device,
    trips: Value,
    flag: Value,
    state: Sequence[Value],
    captured: Sequence[Value],
) -> tuple[Tensor, ...] | None:
    """The loop as one op, where the trace keeps loops."""
    collected = len(loop.elements)
    steps = trips.int() if isinstance(trips, Host) else None
    known = flag is None or (isinstance(flag, Host) and isinstance(flag.item(), bool) and flag.item())
    tensors = [v for v in (as_tensor(v, device) for v in state) if isinstance(v, Tensor)]
    computes = collected or any(isinstance(v, Tensor) for v in state)
    if not (known or isinstance(flag, Tensor)) or not computes or len(tensors) < len(state):
        return None
    if not becomes_one_op(steps):
        return None
    if isinstance(trips, Tensor):
        steps = trips.reshape(()).item()
    steps = None if steps is None else sym_max(cast(int, steps), 0)

    def run(
        counter: Tensor, now: Sequence[Value], _: Sequence[Value], rest: Sequence[Value]
    ) -> Sequence[Value]:
        return loop.body.program.run(device, [counter, scalar(True, torch.bool), *now, *rest])

    going = flag.reshape(()) if isinstance(flag, Tensor) else None
    return looped(run, OnnxSteps(steps, collected, going), Operands(tensors, (), captured), device)


@dataclass(frozen=True)
class Element:
    """What the body declares about one scan output; used only when there was no iteration."""

    dtype: torch.dtype
    dims: tuple[int, ...]


def _elements(graph: GraphProto, count: int) -> tuple[Element, ...]:
    """The declarations of the last `count` outputs of a body; unknown sizes are taken as 0."""
    found: list[Element] = []
    for info in list(graph.output)[len(graph.output) - count :]:
        tensor = info.type.tensor_type
        dtype = torch_dtype(tensor.elem_type) if tensor.elem_type else torch.float32
        found.append(Element(dtype, tuple(max(d.dim_value, 0) for d in tensor.shape.dim)))
    return tuple(found)


def _stack(
    values: Sequence[Value], axis: int, reverse: bool, element: Element, device: torch.device
) -> Value:
    """Scan outputs as one tensor, empty along the new axis when there was no iteration."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        dims = list(element.dims)
        dims.insert(axis, 0)
        return torch.zeros(dims, dtype=element.dtype, device=device)
    return torch.stack(tensors[::-1] if reverse else tensors, axis)


def _is_small_integer(val: Val) -> bool:
    if val.const is None or val.const.is_floating_point() or val.const.is_complex():
        return False
    return val.const.numel() <= MODEL_FILES.max_small_constant_elements


def _loop_body(
    builder: ProgramBuilder, graph: GraphProto, scope: NameScope, carried: Sequence[Val | None], label: str
) -> tuple[Subgraph, list[int], list[ValueKind], list[ValueKind]]:
    """The body with the kinds of its carried values: host values only if they stay such in every iteration."""
    formals = [
        ValueKind.MAYBE
        if v is None or v.kind is ValueKind.MAYBE or _is_small_integer(v)
        else ValueKind.TENSOR
        for v in carried
    ]
    listed = len(builder.context.data_dependent)
    while True:
        body, captured, kinds = builder.subgraph(graph, scope, [ValueKind.MAYBE, ValueKind.MAYBE, *formals])
        if len(kinds) < 1 + len(formals):
            raise ModelError("the body has too few outputs", phase="capture", op="Loop", place=label)
        changed = [
            ValueKind.TENSOR if after is ValueKind.TENSOR else before
            for before, after in zip(formals, kinds[1 : 1 + len(formals)], strict=True)
        ]
        if changed == formals:
            return body, captured, kinds, formals
        formals = changed
        del builder.context.data_dependent[listed:]


def build_loop(
    builder: ProgramBuilder, node: NodeProto, vals: list[Val | None], scope: NameScope, label: str
) -> list[Val | None]:
    """A loop becomes one step; while torch captures, a known trip count unrolls it."""
    vals = vals + [None] * (2 - len(vals))
    graph = _graph(node, "body", label)
    listed = len(builder.context.data_dependent)
    body, captured, kinds, formals = _loop_body(builder, graph, scope, vals[2:], label)
    if kinds[0] is ValueKind.TENSOR or any(v is not None and v.kind is ValueKind.TENSOR for v in vals[:2]):
        builder.context.data_dependent.append(label)
    scans = len(kinds) - 1 - len(formals)
    tensors = len(builder.context.data_dependent) > listed
    carried = [ValueKind.TENSOR if tensors else kind for kind in formals]
    outs = [builder.value(kind) for kind in [*carried, *[ValueKind.TENSOR] * scans][: len(node.output)]]
    ins = [0, *[_operand_slot(builder, v) for v in vals], *captured]
    loop = OnnxLoopBody(body, tuple(formals), _elements(graph, scans), tensors, label)
    builder.add_step(partial(_run_loop, loop), ins, outs, label)
    return list(outs)


def _run_scan(
    body: Subgraph,
    state_count: int,
    axes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
    elements: tuple[Element, ...],
    device: torch.device,
    *args: Value,
) -> object:
    in_axes, in_back, out_axes, out_back = axes
    values = [as_tensor(a, device) for a in args]
    state, rest = values[:state_count], values[state_count:]
    scanned = [v for v in rest[: len(in_axes)] if isinstance(v, Tensor)]
    captured = args[state_count + len(in_axes) :]
    length = scanned[0].shape[in_axes[0]]
    if becomes_one_op(length) and all(isinstance(v, Tensor) for v in values):
        made = _scan_as_op(body, axes, device, (state, scanned, captured))
        if made is not None:
            return made
    outs: list[list[Value]] = [[] for _ in out_axes]
    for t in range(length):
        slices = [
            x.select(axis, length - 1 - t if back else t)
            for x, axis, back in zip(scanned, in_axes, in_back, strict=True)
        ]
        results = body.program.run(device, [*state, *slices, *captured])
        state = [as_tensor(r, device) for r in results[:state_count]]
        for out, value in zip(outs, results[state_count:], strict=True):
            out.append(as_tensor(value, device))
    stacked = [
        _stack(o, axis, bool(back), element, device)
        for o, axis, back, element in zip(outs, out_axes, out_back, elements, strict=True)
    ]
    return (*state, *stacked)


def _scan_as_op(
    body: Subgraph,
    axes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
    device: torch.device,
    operands: tuple[Sequence[Value], Sequence[Tensor], Sequence[Value]],
) -> tuple[Tensor, ...] | None:
    """The scan as one op over dim 0."""
    in_axes, in_back, out_axes, out_back = axes
    state, scanned, captured = operands
    backwards = all((*in_back, *out_back))

    def turned(x: Tensor, back: int) -> Tensor:
        return x.flip(0) if bool(back) != backwards else x

    def run(
        counter: Tensor, now: Sequence[Value], parts: Sequence[Value], rest: Sequence[Value]
    ) -> Sequence[Value]:
        return (None, *body.program.run(device, [*now, *parts, *rest]))

    slices = [turned(x.movedim(a, 0), b) for x, a, b in zip(scanned, in_axes, in_back, strict=True)]
    tensors = [v for v in state if isinstance(v, Tensor)]
    steps = slices[0].shape[0]
    walk = OnnxSteps(steps, len(out_axes), backwards=backwards)
    made = looped(run, walk, Operands(tensors, slices, captured), device)
    if made is None:
        return None
    stacks = [
        turned(x, b).movedim(0, a) for x, a, b in zip(made[len(state) :], out_axes, out_back, strict=True)
    ]
    return (*made[: len(state)], *stacks)


def _run_batched_scan(
    inner: Callable[..., object], device: torch.device, operands: int, *args: Value
) -> object:
    """Opset 8: every operand has a leading batch dim, and the sequence axis counts without it."""
    values = [as_tensor(a, device) for a in args[:operands]]
    first = next(v for v in values if isinstance(v, Tensor))
    rows: list[tuple[Tensor, ...]] = []
    for b in range(first.shape[0]):
        row = [v.select(0, b) if isinstance(v, Tensor) else v for v in values]
        rows.append(inner(device, *row, *args[operands:]))  # type: ignore[arg-type]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def build_scan(
    builder: ProgramBuilder, node: NodeProto, vals: list[Val | None], scope: NameScope, label: str
) -> list[Val | None]:
    """A scan becomes one step that unrolls over the length of the scanned axis."""
    count = _int(node, "num_scan_inputs", 1)
    batched = scope.opsets.get("", 9) < 9
    if batched:
        if vals and vals[0] is not None:
            raise UnsupportedError(
                "sequence_lens", phase="capture", op="Scan", place=label, hint="export with opset 9 or newer"
            )
        vals = vals[1:]
    states = len(vals) - count
    graph = _graph(node, "body", label)
    body, captured, kinds = builder.subgraph(graph, scope, [ValueKind.TENSOR] * len(vals))
    results = len(kinds) - states
    if count < 1 or states < 0 or results < 0:
        raise ModelError("wrong number of scan inputs or outputs", phase="capture", op="Scan", place=label)
    directions = "directions" if batched else "scan_input_directions"
    axes = (
        _ints(node, "scan_input_axes", count),
        _ints(node, directions, count),
        _ints(node, "scan_output_axes", results),
        _ints(node, "scan_output_directions", results),
    )
    run: Callable[..., object] = partial(_run_scan, body, states, axes, _elements(graph, results))
    if batched:
        operands, inner = len(vals), run

        def run_batched(device: torch.device, *args: Value) -> object:
            return _run_batched_scan(inner, device, operands, *args)

        run = run_batched
    outs = [builder.value(ValueKind.TENSOR) for _ in node.output]
    builder.add_step(
        run, [0, *[1 if v is None else builder.slot_of(v) for v in vals], *captured], outs, label
    )
    return list(outs)


def _run_sequence_map(body: Subgraph, operands: int, device: torch.device, *args: Value) -> object:
    lists, captured = args[:operands], args[operands:]
    first = lists[0]
    assert isinstance(first, list)
    outs: list[list[Value]] = [[] for _ in body.program.outputs]
    for i in range(len(first)):
        row = [v[i] if isinstance(v, list) else v for v in lists]
        for out, value in zip(outs, body.program.run(device, [*row, *captured]), strict=True):
            out.append(as_tensor(value, device))
    return tuple(outs)


def build_sequence_map(
    builder: ProgramBuilder, node: NodeProto, vals: list[Val | None], scope: NameScope, label: str
) -> list[Val | None]:
    """Map a body over the elements of a sequence."""
    body, captured, _ = builder.subgraph(_graph(node, "body", label), scope, [ValueKind.TENSOR] * len(vals))
    outs = [builder.value(ValueKind.TENSOR) for _ in node.output]
    ins = [0, *[1 if v is None else builder.slot_of(v) for v in vals], *captured]
    builder.add_step(partial(_run_sequence_map, body, len(vals)), ins, outs, label)
    return list(outs)


@dataclass(frozen=True)
class FlexAttention:
    """What a node says of its attention: bodies that modify scores and probabilities, the scale of scores, and the type
    that probabilities are computed in."""

    score: Subgraph | None
    probability: Subgraph | None
    scale: float | None
    precision: int | None


def _run_flex(
    flex: FlexAttention, device: torch.device, q: Tensor, k: Tensor, v: Tensor, *captured: Value
) -> Tensor:
    def modifier(body: Subgraph | None, values: Sequence[Value]) -> Callable[[Tensor], Tensor] | None:
        if body is None:
            return None

        def modify(x: Tensor) -> Tensor:
            result = as_tensor(body.program.run(device, [x, *values])[0], device)
            assert isinstance(result, Tensor)
            return result

        return modify

    first = flex.score.captures if flex.score else 0
    score, probability = modifier(flex.score, captured[:first]), modifier(flex.probability, captured[first:])
    return flex_attention(q, k, v, score, probability, flex.scale, flex.precision)


def build_flex_attention(
    builder: ProgramBuilder, node: NodeProto, vals: list[Val | None], scope: NameScope, label: str
) -> list[Val | None]:
    """Attention with bodies that modify scores and probabilities."""
    names = {a.name: a for a in node.attribute}
    bodies: list[Subgraph | None] = []
    captured: list[int] = []
    for name in ("score_mod", "prob_mod"):
        body = None
        if name in names:
            body, slots, _ = builder.subgraph(names[name].g, scope, [ValueKind.TENSOR])
            captured += slots
        bodies.append(body)
    scale = names["scale"].f if "scale" in names else None
    precision = names["softmax_precision"].i if "softmax_precision" in names else None
    outs = [builder.value(ValueKind.TENSOR) for _ in node.output]
    ins = [0, *[1 if v is None else builder.slot_of(v) for v in vals], *captured]
    builder.add_step(
        partial(_run_flex, FlexAttention(bodies[0], bodies[1], scale, precision)), ins, outs, label
    )
    return list(outs)


BUILDERS: dict[tuple[str, str], ControlBuilder] = {
    ("", "If"): build_if,
    ("", "Loop"): build_loop,
    ("", "Scan"): build_scan,
    ("", "SequenceMap"): build_sequence_map,
    ("ai.onnx.preview", "FlexAttention"): build_flex_attention,
}
