"""ONNX files as torch modules: each operator is one small function over torch ops."""

from .bind import bind_inputs, typical_shapes
from .module import InputSpec, OnnxModule, load
from .nested import Flat, FlatSplit, Nesting, flatten_inputs
from .split import ModelSegment, Split, split

__all__ = [
    "Flat",
    "FlatSplit",
    "InputSpec",
    "ModelSegment",
    "Nesting",
    "OnnxModule",
    "Split",
    "bind_inputs",
    "flatten_inputs",
    "load",
    "split",
    "typical_shapes",
]
