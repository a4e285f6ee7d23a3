"""Scaled dot product attention in all the forms that torch gives it."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from tilewright.errors import InputError
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import Kind
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.ops import attention as ops
from tilewright.ir.ops import pointwise
from tilewright.ir.ops.view import squeeze
from tilewright.ir.sizes import dims

from .registry import Call, NoDeclaration, Number, ReplacementCall, lower

aten = torch.ops.aten


def _scale(c: Call, q: Value, scale: Number | None) -> Expr | None:
    return None if scale is None else c.number(scale, q.dtype.compute)


def _attend(c: Call, q: Value, k: Value, v: Value, mask: Value | None, dropout: float, causal: bool,
            scale: Number | None) -> tuple[Value, Value]:  # fmt: skip
    if dropout:
        raise NoDeclaration("random")
    if len(q.shape) < 3 or q.dtype.kind is not Kind.FLOAT:
        raise NoDeclaration("attention without heads")
    keys, values = dims.static(k.shape[-2]), dims.static(v.shape[-2])
    if keys is not None and values is not None and keys != values:
        raise InputError(
            f"there are {keys} keys and {values} values", phase="capture", op="attention",
            hint="torch's own op would read behind the last value",
        )  # fmt: skip
    return ops.attention(c.b, q, k, v, mask, causal, _scale(c, q, scale))


@lower(aten._scaled_dot_product_flash_attention_for_cpu.default, reason="attention")
def _flash_cpu(c: Call, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
               attn_mask: Value | None = None, scale: Number | None = None) -> tuple[Value | None, ...]:  # fmt: skip
    out, total = _attend(c, q, k, v, attn_mask, dropout_p, is_causal, scale)
    if 1 not in c.used:
        return out, None
    return out, pointwise.narrow(c.b, squeeze(c.b, total, [-1]), c.results[1])


@lower(aten.scaled_dot_product_attention.default, reason="attention")
def _attention(c: Call, q: Value, k: Value, v: Value, attn_mask: Value | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: Number | None = None, enable_gqa: bool = False) -> Value:  # fmt: skip
    return _attend(c, q, k, v, attn_mask, dropout_p, is_causal, scale)[0]


def _device_form(c: Call, out: Value, total: Value) -> tuple[Value | None, ...]:
    """Further results (statistics, random state) serve the backward pass only."""
    if c.used - {0}:
        raise NoDeclaration("attention statistics")
    return (out, *[None] * (len(c.results) - 1))


@lower(aten._scaled_dot_product_flash_attention.default, reason="attention")
def _flash(c: Call, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False,
           return_debug_mask: bool = False, *, scale: Number | None = None) -> tuple[Value | None, ...]:  # fmt: skip
    return _device_form(c, *_attend(c, q, k, v, None, dropout_p, is_causal, scale))


@lower(aten._scaled_dot_product_cudnn_attention.default, reason="attention")
def _cudnn(c: Call, q: Value, k: Value, v: Value, attn_bias: Value | None, compute_log_sumexp: bool = False,
           dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
           scale: Number | None = None) -> tuple[Value | None, ...]:  # fmt: skip
    mask = attn_bias
    if attn_bias is not None and not is_causal:
        given = {"scale": scale, "enable_gqa": not dims.equal(q.shape[-3], k.shape[-3])}
        condition = _condition(c.b, attn_bias) if HIDES_BY_NUMBER else None
        if condition is not None:
            args = (q, k, v, condition, dropout_p, is_causal)
            c.replacement = ReplacementCall(aten.scaled_dot_product_attention.default, args, given)
            mask = condition
        elif attn_bias.dtype is not q.dtype:
            # cuDNN would read it as numbers of the queries' type: pytorch issue 191612.
            args = (q, k, v, attn_bias, dropout_p, is_causal)
            c.replacement = ReplacementCall(aten._scaled_dot_product_attention_math.default, args, given)
    return _device_form(c, *_attend(c, q, k, v, mask, dropout_p, is_causal, scale))


CUDNN_HIDDEN = -65504.0
"""What torch up to 2.11 adds for cuDNN where a boolean mask is false; by its history -inf from 2.12 on."""
HIDES_BY_NUMBER = TorchVersion(torch.__version__) < "2.12"
"""Whether this torch does so. From another one such a bias is the program's own, and is added: it is also the least
number of a half, with which models hide keys themselves."""


def _condition(b: Builder, bias: Value) -> Value | None:
    """The boolean mask of which torch made a bias for cuDNN; None if it is no such bias. A number that hides nothing
    from a query that sees no key, and that no loop can skip, stands there for -inf."""
    made = b.maker_of(bias)
    body = made.expr.body[0] if made is not None and made.expr is not None else None
    if made is None or body is None or body.op != "where" or body.args[0].op != "read":
        return None
    condition, *values = (made.inputs[int(str(e.value))] if e.op == "read" else e for e in body.args)
    numbers = [_constant(b.number_of(e) if isinstance(e, Value) else e) for e in values]
    if not isinstance(condition, Value) or condition.shape != bias.shape or numbers != [0.0, CUDNN_HIDDEN]:
        return None
    return condition


def _constant(e: Expr | None) -> float | None:
    return float(e.value) if e is not None and e.op == "const" and isinstance(e.value, (int, float)) else None


@lower(
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, reason="attention",
)  # fmt: skip
def _efficient(c: Call, q: Value, k: Value, v: Value, attn_bias: Value | None, compute_log_sumexp: bool = False,
               dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
               scale: Number | None = None) -> tuple[Value | None, ...]:  # fmt: skip
    return _device_form(c, *_attend(c, q, k, v, attn_bias, dropout_p, is_causal, scale))


@lower(aten._safe_softmax.default)
def _safe_softmax(c: Call, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return ops.safe_softmax(c.b, c.to(x, c.dtype), dim)
