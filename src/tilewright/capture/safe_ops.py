"""Which ops a graph of unknown origin may call: torch's own that compute new tensors of tensors and numbers."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator

from torch._ops import OpOverload

from .aten.registry import TABLE

_NAMESPACES = frozenset({"aten", "prims"})
_REACHES_OUT = frozenset({"from_file", "set_data", "is_pinned", "pin_memory", "_pin_memory"})
"""Ops that read or write something besides their operands."""
_CHECKS = frozenset({"_assert_scalar", "_assert_tensor_metadata", "_assert_async"})
"""Ops that only raise or do nothing."""
_TYPES = frozenset({
    "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "int", "SymInt", "float", "bool", "number",
    "str", "Device", "Optional[Device]", "Optional[str]", "Optional[int]", "Optional[float]", "Optional[bool]",
    "Optional[number]", "Optional[SymInt]", "List[int]", "List[SymInt]", "List[float]", "List[bool]",
    "Optional[List[int]]", "Optional[List[SymInt]]", "Optional[List[float]]", "List[number]", "Optional[Generator]",
    "Generator",
})  # fmt: skip
"""Types of what an op may be given: a graph has no value of the others."""
_NUMBERS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.getitem}
)


def is_safe_op(function: object) -> bool:
    """Whether a call of it does nothing but compute, and is checked by torch: ops that are declared here, and public
    ones of torch's own that write into no operand."""
    if not isinstance(function, OpOverload):
        return any(function is f for f in _NUMBERS)
    schema, name = function._schema, function._opname
    if schema.is_mutable or function.namespace not in _NAMESPACES or name in _REACHES_OUT:
        return False
    if name in _CHECKS:
        return True
    plain = all(str(a.type) in _TYPES for a in schema.arguments)
    return function in TABLE or (plain and not name.startswith("_"))
