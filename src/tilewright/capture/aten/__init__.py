"""ATen overloads to declarations, one file per family, and the decompositions that torch does before them."""

from . import attention, contract, index, pointwise, reduce, resample, view
from .decompose import decompositions, mended_ops, preserve_resampling
from .registry import (
    TABLE,
    Call,
    NoDeclaration,
    OpEntry,
    ReplacementCall,
    entry_of,
    lower,
    to_dtype,
    to_torch,
)

FAMILIES = (attention, contract, index, pointwise, reduce, resample, view)
"""The files whose import fills the table."""

__all__ = [
    "FAMILIES",
    "TABLE",
    "Call",
    "NoDeclaration",
    "OpEntry",
    "ReplacementCall",
    "decompositions",
    "entry_of",
    "lower",
    "mended_ops",
    "preserve_resampling",
    "to_dtype",
    "to_torch",
]
