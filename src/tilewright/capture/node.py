"""What a node of a captured torch graph is: its results, its place in the user's code, its name for people."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from tilewright.capture.aten.library import library_reason
from tilewright.errors import VerifyError
from tilewright.ir.dtype import DType, bool_
from tilewright.ir.expr import Expr
from tilewright.ir.graph import CHECK, Value
from tilewright.ir.sizes import cases, dims

from .aten import NoDeclaration, entry_of

NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What stands for a host scalar."""


def mutations(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes that write into a tensor, other than copies into placeholders (which become `Graph.writes`)."""
    found: list[fx.Node] = []
    for n in gm.graph.nodes:
        if not isinstance(n.target, OpOverload):
            continue
        target = n.args[0] if n.args else None
        kept = (
            n.target.overloadpacket.__name__ == "copy_"
            and isinstance(target, fx.Node)
            and target.op == "placeholder"
        )
        if n.target._schema.is_mutable and not kept:  # pyright: ignore[reportPrivateUsage]
            found.append(n)
    return found


def counted_nodes(gm: fx.GraphModule) -> list[str]:
    """Names of the nodes that coverage counts: neither views, arithmetic on host scalars, nor checks."""
    found: list[str] = []
    for n in gm.graph.nodes:
        entry, name = entry_of(n.target), display_name(n.target)
        view = n.target is operator.getitem or (entry is not None and entry.view)
        scalar = isinstance(n.meta.get("val"), NUMBERS) and (
            not isinstance(n.target, OpOverload) or "sym_" in name
        )
        if n.op == "call_function" and not view and not scalar and library_reason(n.target) != CHECK:
            found.append(name)
    return found


def leaves_of(val: object) -> tuple[list[object], bool]:
    """What a node makes, in order, and whether lists lie inside lists."""
    if not isinstance(val, (list, tuple)):
        return [val], False
    parts = [leaves_of(x)[0] if isinstance(x, (list, tuple)) else [x] for x in val]
    return [x for part in parts for x in part], any(isinstance(x, (list, tuple)) for x in val)


def shaped_like(val: object, made: Iterator[object]) -> object:
    """What was made, nested as `val`."""
    return tuple(shaped_like(x, made) for x in val) if isinstance(val, (list, tuple)) else next(made)


def plain_number(entry: object) -> object:
    """A host scalar that is a constant, as a Python number."""
    if isinstance(entry, Expr) and entry.op == "const" and isinstance(entry.value, (bool, int, float)):
        return bool(entry.value) if entry.dtype is bool_ else entry.value
    return entry


def values_in(nested: object) -> Iterable[Value]:
    """The values in arguments, in order."""
    if isinstance(nested, Value):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for x in nested:
            yield from values_in(x)
    elif isinstance(nested, dict):
        yield from values_in(list(nested.values()))


def used_results(node: fx.Node) -> frozenset[int]:
    """Which results of a node are read by anything."""
    taken = [u.args[1] for u in node.users if u.target is operator.getitem]
    if len(taken) < len(node.users):
        return frozenset(range(64))
    return frozenset(k for k in taken if isinstance(k, int))


_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def quantised_types(node: fx.Node) -> list[torch.dtype]:
    """Types of numbers with a scale that a node is told to make. Torch's fake kernels make plain floats of them."""
    told = (*node.args, *node.kwargs.values())
    return [t for t in told if isinstance(t, torch.dtype) and t in _QUANTISED]


def refuses_types(node: fx.Node) -> bool:
    """Whether eager mode raises for the types of what an op of the program reads (a number less truth values, a product
    of two types), of which torch's fake kernels say nothing: its kernel runs on single elements of one type, and not on
    these. Asked of truth values and of several types, and not of the parts that torch takes an op into."""
    op = node.target
    if not isinstance(op, OpOverload) or library_reason(op) == "random":
        return False
    if str(node.meta.get("original_aten")) != str(op):  # of two objects, where the graph was copied
        return False
    read = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [t for t in read if isinstance(t, Tensor)]
    types = {t.dtype for t in tensors}
    if torch.bool not in types and len(types) < 2:
        return False
    if len(tensors) < len(read) or any(
        t.layout is not torch.strided or t.device.type != "cpu" for t in tensors
    ):
        return False
    return not _runs(op, node, None) and _runs(op, node, torch.float32)


def _runs(op: OpOverload, node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether torch's own kernel does, on ones of the operands' ranks, in their types or in another."""

    def one(n: fx.Node) -> Tensor:
        val = n.meta["val"]
        return torch.ones((1,) * val.dim(), dtype=dtype or val.dtype, device="cpu")

    with no_python_dispatcher(), _disable_current_modes(), torch.no_grad():
        try:
            op(*fx.map_arg(node.args, one), **fx.map_arg(node.kwargs, one))  # pyright: ignore[reportCallIssue]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
    return True


def display_name(target: object) -> str:
    """What is called, as people know it: `aten.mm`."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target.overloadpacket.__name__}"
    named: Callable[..., object] | None = target if callable(target) else None
    return getattr(named, "__name__", str(target))


def place_of(node: fx.Node) -> str:
    """The last line of the user's own code that made the node, else the module that holds it."""
    trace = node.meta.get("stack_trace")
    if isinstance(trace, str):
        last = next((line for line in reversed(trace.splitlines()) if line.lstrip().startswith("File ")), "")
        if last:
            file, _, rest = last.strip().removeprefix('File "').partition('", line ')
            return f"{file}:{rest.partition(',')[0]}"
    stack = node.meta.get("nn_module_stack")
    if isinstance(stack, dict) and stack:
        return str(list(stack.values())[-1][0])
    return ""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What one tensor result of a captured node must be."""

    shape: tuple[Expr, ...]
    dtype: DType
    strides: tuple[Expr, ...]


def agree(node: fx.Node, v: Value, r: NodeResult) -> None:
    """A declaration's result against torch's own: types and constant sizes must be equal (else it is a defect of ours:
    VerifyError); symbolic sizes provably (else NoDeclaration: the library call stands in)."""
    if v.dtype == r.dtype and v.shape == r.shape:
        return
    what = f"{v} declared, torch has {r.dtype}{list(r.shape)}"
    if v.dtype != r.dtype or len(v.shape) != len(r.shape):
        raise VerifyError(what, phase="capture", op=display_name(node.target), place=place_of(node))
    for ours, theirs in zip(v.shape, r.shape, strict=True):
        # torch's may forget that none is below 0
        if not dims.equal(ours, theirs) and not cases.equal(ours, dims.maximum(theirs, dims.ZERO)):
            if dims.static(dims.sub(ours, theirs)) is None:
                raise NoDeclaration(f"shape not proved: {what}")
            raise VerifyError(what, phase="capture", op=display_name(node.target), place=place_of(node))
