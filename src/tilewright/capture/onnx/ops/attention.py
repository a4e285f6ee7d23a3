"""Attention, rotary embedding, linear attention and their relatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import is_static, torch_dtype
from tilewright.errors import ModelError, UnsupportedError


@dataclass(frozen=True)
class KeyWindow:
    """Which keys a query at absolute position p may see: p - left <= key <= p + right (-1: unbounded)."""

    causal: bool
    left: int
    right: int

    @property
    def bounded(self) -> bool:
        """Whether any bound holds."""
        return self.causal or self.left >= 0 or self.right >= 0


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """[B, S, H * D] to [B, H, S, D]; rank 4 is returned as it is."""
    if x.dim() == 4:
        return x
    if not heads:
        raise ModelError("the number of heads is missing", phase="capture", op="Attention")
    return x.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, S, D] to [B, S, H * D]."""
    return x.transpose(1, 2).flatten(2)


def _visible(
    window: KeyWindow, queries: int, keys: int, offset: Tensor | int, device: torch.device
) -> Tensor | None:
    """The bool mask of a window, [queries, keys] or [B, 1, queries, keys]; None when all is visible."""
    if not window.bounded:
        return None
    place = torch.arange(queries, device=device).unsqueeze(1) + offset
    key = torch.arange(keys, device=device)
    seen: Tensor | None = None
    bounds: list[Tensor] = []
    if window.causal:
        bounds.append(key <= place)
    if window.left >= 0:
        bounds.append(key >= place - window.left)
    if window.right >= 0:
        bounds.append(key <= place + window.right)
    for bound in bounds:
        seen = bound if seen is None else seen & bound
    return seen


def _extended_mask(mask: Tensor, keys: int) -> Tensor:
    """A mask shorter than the keys hides the rest."""
    missing = keys - mask.shape[-1]
    if is_static(missing) and missing <= 0:
        return mask
    return F.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else -math.inf)


def _masks(
    mask: Tensor | None, window: KeyWindow, valid: Tensor | None, past: int, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(bool mask, float bias) of one call, each broadcastable to [B, H, queries, keys] or None."""
    queries, keys = q.shape[2], k.shape[2]
    offset: Tensor | int = past
    seen: Tensor | None = None
    if valid is not None:
        lengths = valid.to(torch.int64).reshape(-1, 1, 1, 1)
        offset = lengths - queries
        seen = torch.arange(keys, device=q.device) < lengths
    visible = _visible(window, queries, keys, offset, q.device)
    if visible is not None:
        seen = visible if seen is None else seen & visible
    bias: Tensor | None = None
    if mask is not None:
        mask = _extended_mask(mask, keys)
        if mask.dtype == torch.bool:
            seen = mask if seen is None else seen & mask
        else:
            bias = mask
    return seen, bias


@op("Attention", since=23)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    outputs: int = 1,
) -> tuple[Tensor | None, ...]:
    """Scaled dot-product attention with grouped heads, masks, a cache and a soft cap."""
    packed = q.dim() == 3
    q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    if k.shape[2] != v.shape[2]:  # torch would read values behind the last
        raise ModelError("there are not as many values as keys", phase="capture", op="Attention")
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    grouped = bool(q.shape[1] != k.shape[1])  # of a size that is not known, as the trace has it
    window = KeyWindow(bool(is_causal), left_window_size, right_window_size)
    plain = outputs < 4 and softcap == 0.0 and softmax_precision is None
    alone = attn_mask is None and past_key is None and nonpad_kv_seqlen is None
    if plain and alone and is_causal and left_window_size < 0 and right_window_size < 0:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=factor, enable_gqa=grouped)
        return (merge_heads(y) if packed else y, k, v)[:outputs]
    seen, bias = _masks(attn_mask, window, nonpad_kv_seqlen, past, q, k)
    if plain:
        mask = seen if bias is None else bias if seen is None else bias.masked_fill(~seen, -math.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=factor, enable_gqa=grouped)
        return (merge_heads(y) if packed else y, k, v)[:outputs]
    keys, values = k, v
    if grouped:
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    y, scores = _by_hand(
        q, keys, values, seen, bias, factor, softcap, qk_matmul_output_mode, softmax_precision
    )
    return (merge_heads(y) if packed else y, k, v, scores)[:outputs]


def _by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    factor: float,
    softcap: float,
    mode: int,
    precision: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention in steps: (result, the score matrix that `mode` asks for). A row that sees nothing is zero."""
    root = math.sqrt(factor) if factor >= 0 else None
    if root is None:
        scores = torch.matmul(q, k.transpose(-1, -2)) * factor
    else:
        scores = torch.matmul(q * root, (k * root).transpose(-1, -2))
    wanted = scores
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    wanted = scores if mode == 1 else wanted
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    wanted = scores if mode == 2 else wanted
    wide = scores if precision is None else scores.to(torch_dtype(precision))
    probabilities = torch.softmax(wide, -1).to(q.dtype)
    if seen is not None or bias is not None:
        empty = (scores == -math.inf).all(-1, keepdim=True)
        probabilities = probabilities.masked_fill(empty, 0.0)
    wanted = probabilities if mode == 3 else wanted
    return torch.matmul(probabilities, v), wanted


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Rotate pairs of features by the angle of their position."""
    packed = x.dim() == 3
    y = x.unflatten(2, (num_heads, -1)) if packed else x.transpose(1, 2)  # type: ignore[arg-type]
    size = rotary_embedding_dim or y.shape[-1]
    turned, passed = y[..., :size], y[..., size:]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        turned = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        turned = torch.cat([real, imaginary], -1)
    y = torch.cat([turned, passed], -1) if rotary_embedding_dim else turned
    return y.flatten(2) if packed else y.transpose(1, 2)


@op("LinearAttention", since=27)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, Tensor]:
    """The recurrent form, one step at a time: state [B, H, Dk, Dv]."""
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise UnsupportedError(
            f"update rule {update_rule!r}", phase="capture", op="LinearAttention", hint="see the standard"
        )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = kv_num_heads
    queries, keys, values = (
        split_heads(t.to(wide), h) for t, h in ((q, q_num_heads), (k, heads), (v, heads))
    )
    factor = scale or 1.0 / math.sqrt(queries.shape[-1])
    batch, _, steps, dk = keys.shape
    if past_state is None:
        state = torch.zeros(batch, heads, dk, values.shape[-1], dtype=wide, device=q.device)
    else:
        state = past_state.to(wide)
    gate = None if decay is None else torch.exp(split_heads(decay.to(wide), heads))
    rate = None if beta is None else beta.to(wide).transpose(1, 2)
    outs: list[Tensor] = []
    group = q_num_heads // heads
    for t in range(steps):
        key, value = keys[:, :, t], values[:, :, t]
        if gate is not None and update_rule in ("gated", "gated_delta"):
            state = state * gate[:, :, t].unsqueeze(-1)
        if rate is not None and update_rule in ("delta", "gated_delta"):
            held = torch.matmul(key.unsqueeze(-2), state).squeeze(-2)
            value = rate[:, :, t].unsqueeze(-1) * (value - held)
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        shared = state.repeat_interleave(group, 1) if group != 1 else state
        outs.append(torch.matmul(queries[:, :, t].unsqueeze(-2), shared).squeeze(-2) * factor)
    y = torch.stack(outs, 2) if outs else queries.new_zeros(batch, q_num_heads, 0, values.shape[-1])
    return merge_heads(y).to(q.dtype), state.to(q.dtype if past_state is None else past_state.dtype)


@op("CausalConvWithState", since=27)
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over the past, with the last k - 1 inputs carried along."""
    reach = weight.shape[-1] - 1
    joined = F.pad(x, (reach, 0)) if past_state is None else torch.cat([past_state, x], 2)
    y = F.conv1d(joined, weight, bias, groups=weight.shape[0])
    if activation in ("silu", "swish"):
        y = F.silu(y)
    return y, joined.narrow(2, joined.shape[2] - reach, reach)


@op("SwiGLU", since=28)
def swiglu(gate: Tensor, value: Tensor, *, alpha: float = 1.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * value."""
    return gate * torch.sigmoid(gate * alpha) * value


Modifier = Callable[[Tensor], Tensor]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Modifier | None,
    probability: Modifier | None,
    scale: float | None,
    precision: int | None,
) -> Tensor:
    """Attention with functions applied to the scores and to the probabilities."""
    grouped = q.shape[1] // k.shape[1]
    if grouped != 1:
        k, v = k.repeat_interleave(grouped, 1), v.repeat_interleave(grouped, 1)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if precision is not None:
        wide = torch_dtype(precision)
    else:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (torch.matmul(q, k.transpose(-1, -2)) * factor).to(wide)
    if score is not None:
        scores = score(scores)
    probabilities = torch.softmax(scores, -1)
    if probability is not None:
        probabilities = probability(probabilities)
    return torch.matmul(probabilities.to(v.dtype), v).to(q.dtype)
