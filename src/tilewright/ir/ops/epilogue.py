"""Bodies of elementwise ops as templates over slots, for code that can do them on a result while it writes it.

They are taken from the declarations themselves, so that a body of a graph is the same object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, f32
from tilewright.ir.expr import Expr, call, slot, transform
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims

from . import pointwise


def template(declare: Callable[..., Value], tensors: int = 1, constants: int = 0, dtype: DType = f32) -> Expr:
    """The body of a declaration over slots: e0, e1, ... are elements of its tensors, c0, c1, ... its scalars."""
    b = Builder()
    operands = [b.value((dims.integer(2),), dtype) for _ in range(tensors)]
    declare(b, *operands, *(slot("c", k, dtype) for k in range(constants)))
    (op,) = b.ops
    assert op.expr is not None

    def element(e: Expr) -> Expr | None:
        return slot("e", e.value, dtype) if e.op == "read" and isinstance(e.value, int) else None

    return transform(op.expr.body[0], element)


@functools.cache
def activations() -> Mapping[str, Expr]:
    """Templates of activations by name; `clamp` has the constants low and high, `leaky_relu` its slope."""
    return {
        "relu": template(pointwise.relu),
        "clamp": template(pointwise.clamp, constants=2),
        "leaky_relu": template(pointwise.leaky_relu, constants=1),
        "gelu": template(pointwise.gelu),
        "gelu_tanh": template(functools.partial(pointwise.gelu, approximate="tanh")),
        "silu": template(pointwise.silu),
        "hardswish": template(pointwise.hardswish),
        "hardsigmoid": template(pointwise.hardsigmoid),
        "sigmoid": template(pointwise.sigmoid),
        "tanh": template(pointwise.tanh),
    }


@functools.cache
def total() -> Expr:
    """e0 + e1."""
    return template(pointwise.add, tensors=2)


@functools.cache
def affine() -> Expr:
    """e0 * c0 + c1."""
    e0, c0, c1 = slot("e", 0, f32), slot("c", 0, f32), slot("c", 1, f32)
    return call("add", call("mul", e0, c0), c1)
