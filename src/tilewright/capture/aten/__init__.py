"""ATen overloads to declarations, one file per family, and the decompositions that torch does before them."""

from . import contract, pointwise, reduce, view
from .decompose import decompositions
from .registry import TABLE, Call, Entry, NoDeclaration, lower, to_dtype, to_torch

__all__ = [
    "TABLE", "Call", "Entry", "NoDeclaration", "contract", "decompositions", "lower", "pointwise", "reduce", "to_dtype",
    "to_torch", "view",
]  # fmt: skip
