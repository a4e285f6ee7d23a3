"""Tilewright compiles PyTorch modules, functions and ONNX files to fused C++ kernels."""

from tilewright.door import backend, compile, reset, stats
from tilewright.runtime.model import CompiledModel

__all__ = ["CompiledModel", "backend", "compile", "reset", "stats"]
__version__ = "0.1.0"
