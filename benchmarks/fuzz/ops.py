"""The statements that programs are grown from: for each kind, how often it comes and how a line of it is made.

A maker may propose what eager refuses: such lines are dropped. Sizes in templates are read off shapes, so that one text
serves all sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.fuzz.grow import Grower


@dataclass(frozen=True)
class Line:
    """A statement without the names that it binds. No `results`: it writes to its first operand."""

    template: str
    operands: tuple[str, ...]
    results: int = 1


@dataclass(frozen=True)
class Kind:
    """How often, and how."""

    weight: float
    make: Callable[[Grower], Line | None]


def _float(t: Tensor) -> bool:
    return t.is_floating_point()


def _dims(least: int, most: int = 9) -> Callable[[Tensor], bool]:
    return lambda t: t.is_floating_point() and least <= t.dim() <= most


def _line(g: Grower, fits: Callable[[Tensor], bool], templates: tuple[str, ...]) -> Line | None:
    """One of the templates, over one value. `D`, `E` and `K` stand for dims and a small number."""
    a = g.some(fits)
    if a is None:
        return None
    return Line(_filled(g.draw.choice(templates), g.values[a], g.draw), (a,))


def _filled(template: str, t: Tensor, draw: random.Random) -> str:
    d = draw.randrange(-t.dim(), t.dim()) if t.dim() else 0
    e = draw.randrange(t.dim()) if t.dim() else 0
    p = list(range(t.dim()))
    draw.shuffle(p)
    known = {"$D": d, "$E": e, "$K": draw.choice([1, 1, 2, 3]), "$P": p, "$B": draw.random() < 0.5,
             "$C": draw.choice([0.5, 2.0, -1.0, 0.1, 3])}  # fmt: skip
    for name, value in known.items():
        template = template.replace(name, str(value))
    return template


UNARY = (
    "torch.relu({0})", "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.silu({0})", "torch.tanh({0})", "torch.sigmoid({0})",
    "torch.exp({0}.clamp(-4, 3))", "{0}.abs()", "-{0}", "({0}.abs() + 0.3).sqrt()", "torch.rsqrt({0} * {0} + 0.5)",
    "torch.sin({0})", "torch.cos({0})", "torch.erf({0})", "torch.floor({0})", "torch.round({0})", "torch.sign({0})",
    "{0}.square()", "1 / ({0}.abs() + 1)", "torch.log1p({0}.abs())", "F.leaky_relu({0}, 0.1)", "F.hardswish({0})",
    "{0}.clamp(min=-0.5)", "{0}.clamp(-1, 0.7)", "F.softplus({0})", "F.elu({0})", "F.mish({0})", "torch.atan({0})",
    "{0} * $C", "{0} + $C", "$C - {0}", "{0} / 3", "torch.trunc({0})", "torch.frac({0})", "{0} ** 3", "{0}.abs() ** 0.7 + 1",
    "torch.expm1({0}.clamp(-2, 2))", "F.hardtanh({0})", "F.logsigmoid({0})", "torch.nan_to_num({0})", "F.celu({0})",
    "torch.where({0} > 0, {0}, 0.5)", "{0}.masked_fill({0} < -0.5, 0.25)", "torch.log(F.softplus({0}) + 0.1)", "F.tanhshrink({0})",
    "F.softshrink({0}, 0.2)", "F.threshold({0}, 0.1, 0.3)", "F.relu6({0})", "torch.sinc({0})", "torch.special.log_ndtr({0}.clamp(-3, 3))",
    "torch.erfc({0})", "torch.asinh({0})", "torch.exp2({0}.clamp(-4, 3))", "torch.xlogy({0}.abs() + 0.2, {0}.abs() + 0.4)", "torch.deg2rad({0})",
    "torch.polar({0}.abs() + 0.1, {0}).real",
)  # fmt: skip

BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.5)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1} * 2)", "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)", "torch.atan2({0}, {1}.abs() + 0.3)",
    "torch.lerp({0}, {1}, 0.3)", "torch.hypot({0}, {1})", "torch.addcmul({0}, {1}, {1}, value=0.5)", "torch.addcdiv({0}, {1}, {1}.abs() + 1)",
    "torch.logaddexp({0}, {1})", "torch.copysign({0}, {1})", "torch.fmod({0}, {1}.abs() + 2)", "torch.remainder({0}, {1}.abs() + 2)",
    "(({0}.abs() + 0.2) ** {1}.clamp(-2, 2))", "F.mse_loss({0}, {1}, reduction='none')", "F.smooth_l1_loss({0}, {1}, reduction='none')",
    "torch.fmax({0}, {1})", "torch.rsub({0}, {1})", "F.huber_loss({0}, {1}, delta=0.6)", "F.l1_loss({0}, {1})",
)  # fmt: skip

REDUCE = (
    "{0}.sum($D)", "{0}.sum($D, keepdim=True)", "{0}.mean($D, keepdim=$B)", "{0}.amax($D, keepdim=$B)", "{0}.amin($D, keepdim=$B)",
    "{0}.var($D, keepdim=$B)", "{0}.std($D, correction=0, keepdim=$B)", "{0}.norm(dim=$D, keepdim=$B)", "{0}.logsumexp($D, keepdim=$B)",
    "{0}.softmax($D)", "{0}.log_softmax($D)", "{0}.cumsum($D)", "{0}.sum()", "{0}.mean()", "{0}.max()", "{0}.sigmoid().prod($D)",
    "{0}.tanh().cumprod($D)", "{0}.argmax($D)", "{0}.argmin($D, keepdim=True)", "F.normalize({0}, dim=$D)", "{0}.max($D)[0]", "{0}.min($D)[1]",
    "{0}.sum(($E, -1)) if {0}.dim() > 1 else {0}.sum()", "torch.var_mean({0}, $D)[0]", "{0}.abs().sum($D) + {0}.square().mean($D)",
    "F.softmin({0}, $D)", "{0}.logcumsumexp($D)", "{0}.cummax($D)[0]", "{0}.cummin($D)[0]", "{0}.sort($D)[0]", "{0}.topk(1, $D)[0]", "{0}.median($D)[0]",
    "{0}.diff(dim=$D)", "({0} > 0).sum($D)", "({0} > 0.3).any($D)", "({0} < 2).all($D, keepdim=True)", "torch.linalg.vector_norm({0}, 1, $D)",
    "{0}.argsort($D)", "torch.aminmax({0}, dim=$D)[1]", "torch.count_nonzero({0} > 0, $D)", "{0}.nansum($D)", "torch.renorm({0}, 2, $E, 1.5)",
    "torch.trapezoid({0}, dim=$D)", "{0}.float().std()", "({0} > 0).cumsum($D)", "{0}.log_softmax($D).exp().sum($D)",
)  # fmt: skip

VIEW = (
    "{0}.transpose($D, $E)", "{0}.permute($P)", "{0}.reshape({0}.shape[0], -1)", "{0}.reshape(-1)", "{0}.unsqueeze($E)", "{0}.squeeze()",
    "{0}.flip($D)", "{0}.roll($K, $D)", "{0}.narrow($D, 1, {0}.shape[$D] - 1)", "{0}.select($D, 0)", "{0}.select($D, -1)", "{0}[1:]", "{0}[:-1]",
    "{0}[..., ::2]", "{0}[::2]", "{0}[..., 1:]", "{0}.flatten(0, 1)", "{0}.flatten(-2)", "{0}.unfold($D, 3, $K)", "{0}.diagonal(dim1=-1, dim2=-2)",
    "{0}.contiguous()", "{0}.movedim(0, -1)", "{0}.mT", "{0}.unsqueeze(0).expand(3, *{0}.shape)", "{0}.expand(2, *{0}.shape)", "{0}[None]",
    "{0}.chunk(2, $D)[0]", "{0}.chunk(2, $D)[-1]", "{0}.split(3, $D)[0]", "{0}.unbind($D)[-1]", "{0}.unflatten(-1, (2, -1))", "{0}.unflatten($D, (-1, 2))",
    "{0}.clone()", "{0}.clone(memory_format=torch.contiguous_format)", "{0}.view_as({0}).mT.contiguous().mT", "{0}.tensor_split(2, $D)[1]",
    "torch.as_strided({0}, ({0}.numel() // 2,), (1,))", "{0}.swapaxes(0, -1)", "{0}.rot90(1, (0, 1))", "{0}.view(-1)", "{0}.adjoint()",
    "{0}.reshape(-1, {0}.shape[-1])", "{0}.reshape({0}.shape[-1], -1)", "{0}.T.contiguous()", "{0}.detach()", "{0}.broadcast_to(2, *{0}.shape)",
    "{0}.reshape({0}.shape[0], -1, {0}.shape[-1])", "torch.atleast_3d({0})", "{0}.reshape(*{0}.shape[:-1], -1, 2)", "{0}[:, :, None]",
)  # fmt: skip

SHAPED = (
    "F.pad({0}, (1, 2))", "F.pad({0}, (0, 1, 2, 0), value=0.5)", "F.pad({0}, (-1, 2))", "F.pad({0}, (1, 1), mode='reflect')", "F.pad({0}, (2, 1), mode='replicate')",
    "F.pad({0}, (1, 0, 2, 1), mode='reflect')", "F.pad({0}, (1, 1), mode='circular')", "torch.cat([{0}, {0} * 2], $D)", "torch.stack([{0}, -{0}], $D)",
    "{0}.repeat(2, *[1] * ({0}.dim() - 1))", "{0}.repeat_interleave(2, $D)", "{0}.tile(2)", "{0}.tril()", "{0}.triu(1)", "torch.zeros_like({0}) + {0}.mean()",
    "torch.arange({0}.shape[-1], dtype={0}.dtype) * {0}", "{0}.index_select($D, torch.arange({0}.shape[$D] - 1, -1, -1))", "{0}.cat if False else torch.cat([{0}, {0}[:1]])",
    "torch.full_like({0}, 0.5) * {0}", "{0}[torch.arange({0}.shape[0])]", "{0}[..., torch.tensor([0, -1])]", "{0}.new_ones({0}.shape) - {0}",
    "torch.cat([{0}.flatten(), {0}.flatten()[:2]])", "torch.where(torch.arange({0}.shape[-1]) < 4, {0}, -{0})", "torch.nn.functional.one_hot({0}.argmax(-1), {0}.shape[-1]) * {0}",
    "torch.outer({0}.flatten()[:9], {0}.flatten()[-7:])", "torch.block_diag({0}.flatten()[:2], {0}.flatten()[:3])", "torch.diag_embed({0})", "torch.stack([{0}.mean(), {0}.max()])",
    "{0}.masked_fill(torch.ones_like({0}, dtype=torch.bool).tril(), 0.1)", "torch.pixel_shuffle({0}, 2)", "torch.pixel_unshuffle({0}, 2)", "torch.channel_shuffle({0}, 2)",
    "torch.tensor(2.0, dtype={0}.dtype) * {0}", "torch.linspace(0, 1, {0}.shape[-1], dtype={0}.dtype) + {0}", "torch.eye({0}.shape[-1], dtype={0}.dtype) @ {0}.unsqueeze(-1)",
)  # fmt: skip

IMAGE = (
    "F.max_pool2d({0}, 2)", "F.max_pool2d({0}, 3, 1, 1)", "F.max_pool2d({0}, 3, 2, 1, ceil_mode=True)", "F.avg_pool2d({0}, 2)", "F.avg_pool2d({0}, 3, 1, 1)",
    "F.avg_pool2d({0}, 3, 2, 1, count_include_pad=False)", "F.adaptive_avg_pool2d({0}, 1)", "F.adaptive_avg_pool2d({0}, (2, 3))", "F.adaptive_max_pool2d({0}, 2)",
    "F.interpolate({0}, scale_factor=2)", "F.interpolate({0}, scale_factor=2, mode='bilinear')", "F.interpolate({0}, size=(5, 7), mode='bilinear', align_corners=True)",
    "F.interpolate({0}, size=(4, 4), mode='area')", "F.interpolate({0}, scale_factor=1.5, mode='bicubic')", "{0}.mean((2, 3))", "{0}.mean((2, 3), keepdim=True) * {0}",
    "{0}.contiguous(memory_format=torch.channels_last)", "{0}.to(memory_format=torch.channels_last) * 2", "F.unfold({0}, 3, padding=1)", "F.group_norm({0}, 2)",
    "F.instance_norm({0})", "F.local_response_norm({0}, 2)", "{0}.flatten(2).transpose(1, 2)", "{0}.permute(0, 2, 3, 1)", "F.lp_pool2d({0}, 2, 2)", "{0}.sigmoid().mul({0})",
    "F.batch_norm({0}, None, None, training=True)", "F.interpolate({0}, size=(3, 9), mode='nearest-exact')", "F.pad({0}, (1, 1, 1, 1), mode='reflect')",
    "F.dropout2d({0}, 0.0)", "{0}.contiguous(memory_format=torch.channels_last).reshape({0}.shape[0], -1)",
)  # fmt: skip

MUTATION = (
    "{0}.add_(1)", "{0}.mul_(0.5)", "{0}.relu_()", "{0}[0] = 0.5", "{0}[..., 0] += 1", "{0}.fill_(0.3)", "{0}.zero_()", "{0}[1:].mul_(2)", "{0}[..., ::2] = -1.0",
    "{0}.clamp_(-1, 1)", "{0}.tanh_()", "{0}.transpose(0, -1).add_({0}.transpose(0, -1))", "{0}.view(-1)[1:3].zero_()", "{0}.masked_fill_({0} > 1, 0.0)",
    "{0}.select(-1, 0).copy_({0}.select(-1, -1))", "{0}.index_fill_(0, torch.tensor([0]), 0.7)", "{0}.diagonal().fill_(0.2)", "{0}.sub_({0}.mean())",
    "{0}.exp_().clamp_(max=5)", "{0}.neg_()", "{0}.t_() if {0}.dim() == 2 else {0}.neg_()", "{0}.flatten().sigmoid_()", "{0}.squeeze_(0)", "{0}.unsqueeze_(0)",
)  # fmt: skip
MUTATION_BY = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_({1})", "{0}[0].copy_({1}[0])", "{0}[1:].add_({1}[1:])", "{0}.lerp_({1}, 0.2)", "{0}[..., 0] = {1}[..., -1]",
    "{0}.index_add_(0, torch.zeros({1}.shape[0], dtype=torch.int64), {1})", "{0}.scatter_(0, torch.zeros_like({1}, dtype=torch.int64), {1})", "{0}.addcmul_({1}, {1})",
    "{0}.scatter_add_(0, torch.zeros_like({1}, dtype=torch.int64), {1})", "{0}.index_put_((torch.tensor([0, 0]),), {1}[:1], accumulate=True)", "{0}.div_({1}.abs() + 1)",
    "{0}.mT.copy_({1}.mT)", "{0}.masked_scatter_({0} > 0, {1})",
)  # fmt: skip

INTEGER = (
    "{0} + 1", "{0} * 3", "{0} // 2", "{0} % 3", "{0}.sum($D)", "{0}.float() * 0.5", "{0}.cumsum($D)", "{0} == 1", "{0}.to(torch.float32).softmax($D)", "{0}.amax($D)",
    "{0}.bitwise_and(3)", "{0} << 1", "{0}.to(torch.int32) - 2", "{0}.to(torch.uint8)", "{0}.flip($D)", "{0}.T.contiguous()", "({0} > 0).float()", "{0}.prod($D)",
    "{0}.to(torch.int8).neg()", "{0}.argmax($D)", "{0}.clamp(0, 1)", "-{0} // 3", "-{0} % 5", "{0} / 2", "{0}.float().mean($D)", "torch.div(-{0}, 2, rounding_mode='trunc')",
    "{0}.bool().logical_not()", "{0}.sort($D)[0]", "torch.where({0} > 1, {0}, -{0})", "{0}.bitwise_xor(5)", "{0}.abs().sqrt()", "{0}.to(torch.int16) * 1000", "{0}.sign()",
)  # fmt: skip


def _unary(g: Grower) -> Line | None:
    return _line(g, _float, UNARY)


def _broadcasts(a: Tensor) -> Callable[[Tensor], bool]:
    def fits(b: Tensor) -> bool:
        if not b.is_floating_point() or b is a:
            return False
        try:
            torch.broadcast_shapes(a.shape, b.shape)
        except RuntimeError:
            return False
        return True

    return fits


def _binary(g: Grower) -> Line | None:
    a = g.some(_float)
    if a is None:
        return None
    t = g.values[a]
    b = g.some(_broadcasts(t)) if g.draw.random() < 0.8 else None
    if b is None:
        keep = g.draw.randint(0, t.dim())
        names = g.size_names(tuple(t.shape))[keep:]
        b = g.given(tuple(1 if g.draw.random() < 0.2 else n for n in names))
    operands = (a, b) if g.draw.random() < 0.5 else (b, a)
    return Line(g.draw.choice(BINARY), operands)


def _reduce(g: Grower) -> Line | None:
    return _line(g, _dims(1), REDUCE)


def _view(g: Grower) -> Line | None:
    return _line(g, lambda t: t.dim() >= 1, VIEW)


def _shaped(g: Grower) -> Line | None:
    return _line(g, _dims(1, 5), SHAPED)


def _image(g: Grower) -> Line | None:
    return _line(g, _dims(4, 4), IMAGE)


def _integer(g: Grower) -> Line | None:
    return _line(g, lambda t: not t.is_floating_point() and t.dim() > 0, INTEGER)


def _mutation(g: Grower) -> Line | None:
    inputs = {x.name for x in g.givens if x.grad}
    if g.draw.random() < 0.5:
        a = g.some(lambda t: t.is_floating_point() and t.dim() > 0)
        return None if a is None or a in inputs else Line(g.draw.choice(MUTATION), (a,), 0)
    a = g.some(lambda t: t.is_floating_point() and t.dim() > 0)
    if a is None or a in inputs:
        return None
    t = g.values[a]
    b = g.some(lambda u: u.is_floating_point() and u.shape == t.shape and u is not t)
    return None if b is None else Line(g.draw.choice(MUTATION_BY), (a, b), 0)


def _rest(g: Grower, a: str, least: int) -> tuple[int | str, ...]:
    return g.size_names(tuple(g.values[a].shape))[least:]


def _product(g: Grower) -> Line | None:
    a = g.some(_dims(2, 4))
    if a is None:
        return None
    t = g.values[a]
    dtype = str(t.dtype).removeprefix("torch.")
    depth = g.size_names(tuple(t.shape))[-1]
    wide = g.draw.choice([1, 3, 8, 16, 17])
    kind = g.draw.randint(0, 7)
    if kind == 0:
        return Line("F.linear({0}, {1})", (a, g.given((wide, depth), dtype)))
    if kind == 1:
        return Line("F.linear({0}, {1}, {2})", (a, g.given((wide, depth), dtype), g.given((wide,), dtype)))
    if kind == 2:
        return Line("{0} @ {1}", (a, g.given((depth, wide), dtype)))
    if kind == 3:
        return Line("{0} @ {0}.mT", (a,))
    if kind == 4:
        return Line("torch.einsum('...ij,...kj->...ik', {0}, {0})", (a,))
    if kind == 5:
        return Line("torch.einsum('...i,ji->...j', {0}, {1})", (a, g.given((wide, depth), dtype)))
    if kind == 6:
        other = g.some(lambda u: u.dim() == t.dim() and u.dtype == t.dtype and u.shape[-2] == t.shape[-1] and u.shape[:-2] == t.shape[:-2])
        return None if other is None else Line("torch.matmul({0}, {1})", (a, other))
    return Line("({0}.unsqueeze(-1) * {1}).sum(-2)", (a, g.given((depth, wide), dtype)))


def _attention(g: Grower) -> Line | None:
    a = g.some(lambda t: t.is_floating_point() and t.dim() in (3, 4) and t.shape[-1] <= 64 and t.shape[-2] <= 80)
    if a is None:
        return None
    return _line(g, lambda t: t is g.values[a], (
        "F.scaled_dot_product_attention({0}, {0}, {0})", "F.scaled_dot_product_attention({0}, {0}, {0}, is_causal=True)",
        "({0} @ {0}.mT / 4).softmax(-1) @ {0}", "(({0} @ {0}.mT) * 0.3).masked_fill(torch.ones({0}.shape[-2], {0}.shape[-2], dtype=torch.bool).triu(1), float('-inf')).softmax(-1) @ {0}",
        "({0} @ {0}.mT / 4).softmax(-1).sum(-2)", "({0} @ {0}.mT / 4).sigmoid() @ {0}", "({0} @ {0}.mT).relu().square() @ {0}",
        "(lambda s: (s.exp() / (1 + s.exp().sum(-1, keepdim=True))) @ {0})(({0} @ {0}.mT / 8).clamp(-5, 5))", "({0} @ {0}.mT / 4).logsumexp(-1)",
        "(({0} @ {0}.mT / 4).softmax(-2)).mT @ {0}",
    ))  # fmt: skip


def _convolution(g: Grower) -> Line | None:
    a = g.some(_dims(3, 4))
    if a is None:
        return None
    t = g.values[a]
    dtype = str(t.dtype).removeprefix("torch.")
    channels = t.shape[1]
    groups = g.draw.choice([1, 1, 1, channels, 2 if channels % 2 == 0 else 1])
    wide = groups * g.draw.choice([1, 2, 4, 5])
    size = g.draw.choice([1, 3, 3, 2])
    if not isinstance(g.size_names((channels,))[0], int) or channels > 64:
        return None
    spatial = t.dim() - 2
    extra = f"stride={g.draw.choice([1, 1, 2])}, padding={g.draw.choice([0, 1, size // 2])}, dilation={g.draw.choice([1, 1, 2])}, groups={groups}"
    if g.draw.random() < 0.2:
        weight = g.given((channels, wide // groups, *[size] * spatial), dtype)
        return Line(f"F.conv_transpose{spatial}d({{0}}, {{1}}, None, {extra.replace('dilation=2', 'dilation=1')})", (a, weight))
    weight = g.given((wide, channels // groups, *[size] * spatial), dtype)
    if g.draw.random() < 0.5:
        return Line(f"F.conv{spatial}d({{0}}, {{1}}, None, {extra})", (a, weight))
    return Line(f"F.conv{spatial}d({{0}}, {{1}}, {{2}}, {extra})", (a, weight, g.given((wide,), dtype)))


def _norm(g: Grower) -> Line | None:
    a = g.some(_dims(2, 4))
    if a is None:
        return None
    t = g.values[a]
    dtype = str(t.dtype).removeprefix("torch.")
    sizes = g.size_names(tuple(t.shape))
    kind = g.draw.randint(0, 4)
    if kind == 0:
        return Line("F.layer_norm({0}, {0}.shape[-1:], {1}, {2})", (a, g.given(sizes[-1:], dtype), g.given(sizes[-1:], dtype)))
    if kind == 1:
        return Line("F.rms_norm({0}, {0}.shape[-1:], {1})", (a, g.given(sizes[-1:], dtype)))
    if kind == 2:
        return Line("F.batch_norm({0}, None, None, {1}, {2}, training=True)", (a, g.given((sizes[1],), dtype), g.given((sizes[1],), dtype)))
    if kind == 3:
        return Line("F.batch_norm({0}, {1}, {2}.abs() + 0.5)", (a, g.given((sizes[1],), dtype), g.given((sizes[1],), dtype)))
    return Line("F.group_norm({0}, 2, {1}, {2})", (a, g.given((sizes[1],), dtype), g.given((sizes[1],), dtype)))


def _gather(g: Grower) -> Line | None:
    i = g.some(lambda t: t.dtype == torch.int64 and t.dim() > 0 and 0 <= int(t.min()) and int(t.max()) < 9)
    a = g.some(_dims(1, 4))
    if i is None or a is None:
        return None
    t, index = g.values[a], g.values[i]
    inside = "{1}.remainder({0}.shape[$D])"
    templates = ["{0}[%s]" % inside.replace("$D", "0"), "F.embedding(%s, {0})" % inside.replace("$D", "0"),
                 "{0}.index_select(0, %s.flatten())" % inside.replace("$D", "0"), "torch.take({0}, %s)" % inside.replace("$D", "0"),
                 "{0}[..., %s]" % inside.replace("$D", "-1"), "F.one_hot({1}.remainder(5), 5).sum(0) + {0}.sum()"]  # fmt: skip
    if index.dim() == t.dim():
        templates += ["{0}.gather($D, %s)" % inside, "torch.zeros_like({0}).scatter_add($D, %s, {0})" % inside] * 3
        templates += ["{0}.scatter($D, %s, 0.5)" % inside, "torch.take_along_dim({0}, %s, $D)" % inside]
    return Line(_filled(g.draw.choice(templates), t, g.draw), (a, i))


def _cast(g: Grower) -> Line | None:
    if g.halves:
        return _line(g, _float, ("{0}.to(torch.float16)", "{0}.to(torch.bfloat16)", "{0}.to(torch.float32)"))
    return _line(g, lambda t: True, ("{0}.to(torch.float32)", "{0}.to(torch.float32) * 0.1"))


def _joined(g: Grower) -> Line | None:
    a = g.some(_dims(1))
    if a is None:
        return None
    t = g.values[a]
    b = g.some(lambda u: u.is_floating_point() and u.shape == t.shape and u is not t)
    if b is None:
        return None
    d = g.draw.randrange(t.dim())
    return Line(g.draw.choice([f"torch.cat([{{0}}, {{1}}], {d})", f"torch.stack([{{0}}, {{1}}], {d})", "torch.stack([{0}, {1}]).amax(0)",
                               f"torch.cat([{{0}}, {{1}}], {d}).softmax({d})", f"F.cosine_similarity({{0}}, {{1}}, {d})", f"torch.cdist({{0}}, {{1}})"]), (a, b))  # fmt: skip


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "unary": Kind(20, _unary),
        "binary": Kind(18, _binary),
        "reduce": Kind(14, _reduce),
        "view": Kind(16, _view),
        "shaped": Kind(7, _shaped),
        "image": Kind(5, _image),
        "integer": Kind(4, _integer),
        "mutation": Kind(5, _mutation),
        "product": Kind(5, _product),
        "attention": Kind(1.5, _attention),
        "convolution": Kind(3, _convolution),
        "norm": Kind(3, _norm),
        "gather": Kind(3, _gather),
        "cast": Kind(2, _cast),
        "joined": Kind(3, _joined),
    }
)
