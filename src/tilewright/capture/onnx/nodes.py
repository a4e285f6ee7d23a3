"""What is known of a node of a file before it runs: its label, its attributes, how many inputs it takes, and the body
that the standard gives it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto
from torch import Tensor

from tilewright.capture.onnx.values.run import Value
from tilewright.capture.onnx.values.traced import Val
from tilewright.errors import ModelError, shown
from tilewright.tuning.input_limits import MODEL_FILES
from tilewright.tuning.text_limits import TEXTS

from .registry import OpDef


def is_surely_small(args: Sequence[Value]) -> bool:
    """Whether no operator (but those that check sizes themselves) can make a large result of these inputs."""
    return math.prod(max(a.numel(), 1) for a in args if isinstance(a, Tensor)) <= MODEL_FILES.max_folded_bytes


def is_small_on_meta(entry: OpDef, args: Sequence[Value], keywords: Mapping[str, object]) -> bool:
    """Whether the result is small, found without computing it; False when that cannot be told."""
    try:
        result = entry.function(*[a.to("meta") if isinstance(a, Tensor) else a for a in args], **keywords)
    except (RuntimeError, TypeError, ValueError):
        return False
    items = result if isinstance(result, tuple) else (result,)
    return (
        sum(i.numel() * i.element_size() for i in items if isinstance(i, Tensor))
        <= MODEL_FILES.max_folded_bytes
    )


def check_arity(entry: OpDef, vals: Sequence[Val | None], keywords: Mapping[str, object], label: str) -> None:
    """ModelError when a required input or attribute is missing, or there are too many inputs."""
    missing = [i for i in range(entry.least) if i >= len(vals) or vals[i] is None]
    if missing or (entry.most is not None and len(vals) > entry.most):
        wanted = f"{entry.least} or more" if entry.most is None else f"{entry.least} to {entry.most}"
        message = f"{len(vals)} inputs, or an empty required one; {entry.name} takes {wanted}"
        raise ModelError(message, phase="capture", op=entry.name, place=label)
    absent = sorted(entry.required - keywords.keys())
    if absent:
        raise ModelError(f"attribute {absent[0]!r} is missing", phase="capture", op=entry.name, place=label)


def attribute_kinds(node: NodeProto, version: int) -> dict[str, int]:
    """The types of an operator's attributes by name; empty if the standard does not know it."""
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "" if node.domain == "ai.onnx" else node.domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: int(a.type.value) for name, a in schema.attributes.items()}  # type: ignore[attr-defined]


def opset_table(entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain to version."""
    return {"" if e.domain == "ai.onnx" else e.domain: e.version for e in entries}


def label_of(node: NodeProto, index: int) -> str:
    """How messages name a node."""
    op, name = shown(node.op_type, TEXTS.max_name_characters), shown(node.name, TEXTS.max_name_characters)
    return f"{op} {name!r} (#{index})" if name else f"{op} (#{index})"


def schema_body(
    node: NodeProto, domain: str, version: int
) -> tuple[FunctionProto, dict[str, AttributeProto]] | None:
    """The standard's function body of an operator, if it has one that needs no types, and its defaults."""
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    if not schema.has_function:  # type: ignore[attr-defined]
        return None
    defaults = {
        name: attribute.default_value
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != AttributeProto.UNDEFINED
    }
    return schema.function_body, defaults
