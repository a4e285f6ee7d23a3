"""Operands of ops that read as many elements as another operand says, without a look at how many there are: torch's
kernels leave that to who calls them, and so do the fake ones by which graphs are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import SymInt, Tensor
from torch._ops import OpOverload

__all__ = ["BAGS", "RELYING", "fits"]

_Given = Mapping[str, object]


def fits(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the operands of one of these ops are proved to fit each other; true of other ops. Tensors may be fake."""
    law = _LAWS.get(op._opname)  # pyright: ignore[reportPrivateUsage]
    if law is None:
        return True
    schema = op._schema  # pyright: ignore[reportPrivateUsage]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    return law(given | dict(kwargs))


def _attends(given: _Given) -> bool:
    """The composite looks at all but how many keys and values there are."""
    keys, values = given.get("key"), given.get("value")
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or min(keys.dim(), values.dim()) < 2:
        return False
    return _equal(keys.shape[-2], values.shape[-2])


def _attends_at_once(given: _Given) -> bool:
    tensors = [given.get(name) for name in ("query", "key", "value")]
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in tensors):
        return False
    q, k, v = cast(list[Tensor], tensors)
    if not q.dtype == k.dtype == v.dtype or not _equal(q.shape[3], k.shape[3]):
        return False
    if not all(_equal(t.stride(3), 1) for t in (q, k, v)) or _equal(q.shape[2], 0) or _equal(k.shape[2], 0):
        return False  # it takes a row's elements side by side, and divides by the number of rows
    same = [(q.shape[0], k.shape[0]), *((k.shape[d], v.shape[d]) for d in range(3))]
    return all(_equal(a, b) for a, b in same) and _divides(k.shape[1], q.shape[1])


def _normalises(given: _Given) -> bool:
    """Weights, biases and statistics have an element for each channel."""
    x = given.get("input")
    if not isinstance(x, Tensor) or x.dim() < 2:
        return False
    others = [given.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    return all(
        t is None or (isinstance(t, Tensor) and t.dim() == 1 and _equal(t.shape[0], x.shape[1]))
        for t in others
    )


def _resizes(given: _Given) -> bool:
    """No result lies behind the last element, by the scales that are given: they need not be those of the sizes."""
    if "scale_factors" in given:
        return True  # the sizes are computed of these
    x, sizes = given.get("self"), given.get("output_size")
    scales = given.get("scales_h"), given.get("scales_w")
    if (
        not isinstance(x, Tensor)
        or x.dim() != 4
        or not isinstance(sizes, (list, tuple))
        or len(cast(Sequence[object], sizes)) != 2
    ):
        return False
    return all(
        scale is None or _reaches(scale, before, after)
        for scale, before, after in zip(scales, x.shape[2:], cast(Sequence[object], sizes), strict=True)
    )


def _reaches(scale: object, before: object, after: object) -> bool:
    """Whether so many elements are known to be so many times as many, or fewer."""
    if not isinstance(scale, float) or type(before) is not int or type(after) is not int:
        return False
    return before * scale * (1 + 1e-6) >= after


def _sums_bags(given: _Given) -> bool:
    """There is a bag where the largest of each is found."""
    offsets = given.get("offsets")
    if not isinstance(offsets, Tensor) or offsets.dim() != 1:
        return False
    return given.get("mode") in (0, 1) or _is_some(offsets.shape[0])


BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
"""Ops that rely on offsets that grow."""
_LAWS: dict[str, Callable[[_Given], bool]] = {
    "scaled_dot_product_attention": _attends,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attends_at_once,
    ),
    **dict.fromkeys(
        (
            "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training", "_batch_norm_with_update_functional", "native_batch_norm",
            "cudnn_batch_norm", "miopen_batch_norm",
        ),
        _normalises,
    ),
    **dict.fromkeys(BAGS, _sums_bags),
    **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), _resizes),
}  # fmt: skip
RELYING = frozenset(_LAWS)
"""The names of these ops."""


def _equal(a: object, b: object) -> bool:
    if type(a) is int and type(b) is int:
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(cast(SymInt, a) == cast(SymInt, b))


def _is_some(n: object) -> bool:
    if type(n) is int:
        return n > 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(cast(SymInt, n) > 0)


def _divides(a: object, b: object) -> bool:
    return _equal(a, b) or (type(a) is int and type(b) is int and a > 0 and b % a == 0)
