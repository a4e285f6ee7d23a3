"""What nodes refuse, as errors that name the node; and the types that the standard's operators take."""

from __future__ import annotations

import re

import onnx

from tilewright.errors import ModelError, TilewrightError
from tilewright.tuning.input_limits import MODEL_FILES

FITS = "check the node's attributes, and the shapes and types that reach it"
INTACT = "check the file with onnx.checker; is it complete, and does its exporter support this opset?"

_PLAIN = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    ZeroDivisionError,
    AssertionError,
    OverflowError,
)


def op_of(label: str) -> str:
    """The operator's name in the label of a node."""
    return label.partition(" ")[0]


def completed(error: TilewrightError, label: str) -> TilewrightError:
    """`error` with the node that raised it and a hint, where it names none."""
    error.op = error.op or op_of(label)
    error.place = error.place or label
    error.hint = error.hint or FITS
    return error


def is_refusal(error: Exception) -> bool:
    """Whether an error is what an op says of its arguments. What torch's capture raises has types of its own."""
    return type(error) in _PLAIN


def refused(error: Exception, label: str) -> ModelError:
    """What node `label` said of what reached it."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return ModelError(
        f"a node does not fit what reaches it: {said}",
        phase="capture",
        op=op_of(label),
        place=label,
        hint=FITS,
    )


def check_types(model: onnx.ModelProto, place: str) -> None:
    """ModelError where a node gets an element type that its operator does not take, or mixes types."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if len(tensor.raw_data) > MODEL_FILES.max_inspected_initialiser_bytes:
            tensor.ClearField("raw_data")
    try:
        onnx.shape_inference.infer_shapes(light, check_type=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        text = str(error)
        if "unsupported type" not in text and "inconsistent type" not in text:
            return  # declared shapes are never trusted, and what else does not fit shows when the node runs
        found = re.search(r"op_type:\s*(\w+)(?:, node name: ([^)]*))?\):?\s*(.*)", text, re.DOTALL)
        op, name, said = found.groups() if found else ("", "", text)
        raise ModelError(
            f"types do not fit: {said}", phase="capture", op=op, place=f"{op} {name!r}" if name else place,
            hint="insert Cast nodes, or export the model again",
        ) from error  # fmt: skip
