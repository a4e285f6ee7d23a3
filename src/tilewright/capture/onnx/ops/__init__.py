"""The operators, one file per family; importing this package fills the table."""

from tilewright.capture.onnx import host
from tilewright.capture.onnx.ops import activation, cast, math, nn, norm, pool, reduce, resize, shape

__all__ = ["activation", "cast", "host", "math", "nn", "norm", "pool", "reduce", "resize", "shape"]
