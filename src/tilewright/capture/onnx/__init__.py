"""ONNX files as torch modules: each operator is one small function over torch ops."""

from tilewright.capture.onnx.bind import bind_inputs
from tilewright.capture.onnx.module import InputSpec, OnnxModule, load

__all__ = ["InputSpec", "OnnxModule", "bind_inputs", "load"]
