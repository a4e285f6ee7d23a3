"""The lines that programs are grown from, by what they are written over.

`$D` and `$E` stand for dims, `$K` for 1, 2 or 3, `$C` for a number, `$B` for a truth value, `$P` for a permutation.
"""

from __future__ import annotations


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


UNARY = _lines("""
    torch.relu({0})
    F.gelu({0})
    F.gelu({0}, approximate='tanh')
    F.silu({0})
    torch.tanh({0})
    torch.sigmoid({0})
    torch.exp({0}.clamp(-4, 3))
    {0}.abs()
    -{0}
    ({0}.abs() + 0.3).sqrt()
    torch.rsqrt({0} * {0} + 0.5)
    torch.sin({0})
    torch.cos({0})
    torch.erf({0})
    torch.floor({0})
    torch.round({0})
    torch.sign({0})
    {0}.square()
    1 / ({0}.abs() + 1)
    torch.log1p({0}.abs())
    F.leaky_relu({0}, 0.1)
    F.hardswish({0})
    {0}.clamp(min=-0.5)
    {0}.clamp(-1, 0.7)
    F.softplus({0})
    F.elu({0})
    F.mish({0})
    torch.atan({0})
    {0} * $C
    {0} + $C
    $C - {0}
    {0} / 3
    torch.trunc({0})
    torch.frac({0})
    {0} ** 3
    {0}.abs() ** 0.7 + 1
    torch.expm1({0}.clamp(-2, 2))
    F.hardtanh({0})
    F.logsigmoid({0})
    torch.nan_to_num({0})
    F.celu({0})
    torch.where({0} > 0, {0}, 0.5)
    torch.where(torch.where({0} > 0.3, {0} < 1, {0} > -1), {0}, 0.25)
    torch.where(torch.where({0}.mean() > 0.1, {0}.amax() < 1, {0}.amin() > -1), {0}, -0.5 * {0})
    {0}.masked_fill({0} < -0.5, 0.25)
    torch.log(F.softplus({0}) + 0.1)
    F.tanhshrink({0})
    F.softshrink({0}, 0.2)
    F.threshold({0}, 0.1, 0.3)
    F.relu6({0})
    torch.sinc({0})
    torch.special.log_ndtr({0}.clamp(-3, 3))
    torch.erfc({0})
    torch.asinh({0})
    torch.exp2({0}.clamp(-4, 3))
    torch.xlogy({0}.abs() + 0.2, {0}.abs() + 0.4)
    torch.deg2rad({0})
    torch.polar({0}.abs() + 0.1, {0}).real
""")
"""Over one float value."""

BINARY = _lines("""
    {0} + {1}
    {0} - {1}
    {0} * {1}
    {0} / ({1}.abs() + 0.5)
    torch.maximum({0}, {1})
    torch.minimum({0}, {1})
    torch.where({0} > {1}, {0}, {1} * 2)
    torch.where(torch.where({0} > {1}, {0} > 0, {1} > 0.5), {0}, {1} * 0.5)
    torch.add({0}, {1}, alpha=2)
    torch.sub({0}, {1}, alpha=0.5)
    torch.atan2({0}, {1}.abs() + 0.3)
    torch.lerp({0}, {1}, 0.3)
    torch.hypot({0}, {1})
    torch.addcmul({0}, {1}, {1}, value=0.5)
    torch.addcdiv({0}, {1}, {1}.abs() + 1)
    torch.logaddexp({0}, {1})
    torch.copysign({0}, {1})
    torch.fmod({0}, {1}.abs() + 2)
    torch.remainder({0}, {1}.abs() + 2)
    (({0}.abs() + 0.2) ** {1}.clamp(-2, 2))
    F.mse_loss({0}, {1}, reduction='none')
    F.smooth_l1_loss({0}, {1}, reduction='none')
    torch.fmax({0}, {1})
    torch.rsub({0}, {1})
    F.huber_loss({0}, {1}, delta=0.6)
    F.l1_loss({0}, {1})
""")
"""Over two float values that broadcast."""

REDUCE = _lines("""
    {0}.sum($D)
    {0}.sum($D, keepdim=True)
    {0}.mean($D, keepdim=$B)
    {0}.amax($D, keepdim=$B)
    {0}.amin($D, keepdim=$B)
    {0}.var($D, keepdim=$B)
    {0}.std($D, correction=0, keepdim=$B)
    {0}.norm(dim=$D, keepdim=$B)
    {0}.logsumexp($D, keepdim=$B)
    {0}.softmax($D)
    {0}.log_softmax($D)
    {0}.cumsum($D)
    {0}.sum()
    {0}.mean()
    {0}.max()
    {0}.sigmoid().prod($D)
    {0}.tanh().cumprod($D)
    {0}.argmax($D)
    {0}.argmin($D, keepdim=True)
    F.normalize({0}, dim=$D)
    {0}.max($D)[0]
    {0}.min($D)[1]
    {0}.sum(($E, -1)) if {0}.dim() > 1 else {0}.sum()
    torch.var_mean({0}, $D)[0]
    {0}.abs().sum($D) + {0}.square().mean($D)
    F.softmin({0}, $D)
    {0}.logcumsumexp($D)
    {0}.cummax($D)[0]
    {0}.cummin($D)[0]
    {0}.sort($D)[0]
    {0}.topk(1, $D)[0]
    {0}.median($D)[0]
    {0}.diff(dim=$D)
    ({0} > 0).sum($D)
    ({0} > 0.3).any($D)
    ({0} < 2).all($D, keepdim=True)
    torch.linalg.vector_norm({0}, 1, $D)
    {0}.argsort($D)
    torch.aminmax({0}, dim=$D)[1]
    torch.count_nonzero({0} > 0, $D)
    {0}.nansum($D)
    torch.renorm({0}, 2, $E, 1.5)
    torch.trapezoid({0}, dim=$D)
    {0}.float().std()
    ({0} > 0).cumsum($D)
    {0}.log_softmax($D).exp().sum($D)
""")
"""Over one float value with dims."""

VIEW = _lines("""
    {0}.transpose($D, $E)
    {0}.permute($P)
    {0}.reshape({0}.shape[0], -1)
    {0}.reshape(-1)
    {0}.unsqueeze($E)
    {0}.squeeze()
    {0}.flip($D)
    {0}.roll($K, $D)
    {0}.narrow($D, 1, {0}.shape[$D] - 1)
    {0}.select($D, 0)
    {0}.select($D, -1)
    {0}[1:]
    {0}[:-1]
    {0}[..., ::2]
    {0}[::2]
    {0}[..., 1:]
    {0}.flatten(0, 1)
    {0}.flatten(-2)
    {0}.unfold($D, 3, $K)
    {0}.diagonal(dim1=-1, dim2=-2)
    {0}.contiguous()
    {0}.movedim(0, -1)
    {0}.mT
    {0}.unsqueeze(0).expand(3, *{0}.shape)
    {0}.expand(2, *{0}.shape)
    {0}[None]
    {0}.chunk(2, $D)[0]
    {0}.chunk(2, $D)[-1]
    {0}.split(3, $D)[0]
    {0}.unbind($D)[-1]
    {0}.unflatten(-1, (2, -1))
    {0}.unflatten($D, (-1, 2))
    {0}.clone()
    {0}.clone(memory_format=torch.contiguous_format)
    {0}.view_as({0}).mT.contiguous().mT
    {0}.tensor_split(2, $D)[1]
    torch.as_strided({0}, ({0}.numel() // 2,), (1,))
    {0}.swapaxes(0, -1)
    {0}.rot90(1, (0, 1))
    {0}.view(-1)
    {0}.adjoint()
    {0}.reshape(-1, {0}.shape[-1])
    {0}.reshape({0}.shape[-1], -1)
    {0}.T.contiguous()
    {0}.detach()
    {0}.broadcast_to(2, *{0}.shape)
    {0}.reshape({0}.shape[0], -1, {0}.shape[-1])
    torch.atleast_3d({0})
    {0}.reshape(*{0}.shape[:-1], -1, 2)
    {0}[:, :, None]
""")
"""Over one value with dims."""

SHAPED = _lines("""
    F.pad({0}, (1, 2))
    F.pad({0}, (0, 1, 2, 0), value=0.5)
    F.pad({0}, (-1, 2))
    F.pad({0}, (1, 1), mode='reflect')
    F.pad({0}, (2, 1), mode='replicate')
    F.pad({0}, (1, 0, 2, 1), mode='reflect')
    F.pad({0}, (1, 1), mode='circular')
    torch.cat([{0}, {0} * 2], $D)
    torch.stack([{0}, -{0}], $D)
    {0}.repeat(2, *[1] * ({0}.dim() - 1))
    {0}.repeat_interleave(2, $D)
    {0}.tile(2)
    {0}.tril()
    {0}.triu(1)
    torch.zeros_like({0}) + {0}.mean()
    torch.arange({0}.shape[-1], dtype={0}.dtype) * {0}
    {0}.index_select($D, torch.arange({0}.shape[$D] - 1, -1, -1))
    torch.cat([{0}, {0}[:1]])
    torch.full_like({0}, 0.5) * {0}
    {0}[torch.arange({0}.shape[0])]
    {0}[..., torch.tensor([0, -1])]
    {0}.new_ones({0}.shape) - {0}
    torch.cat([{0}.flatten(), {0}.flatten()[:2]])
    torch.where(torch.arange({0}.shape[-1]) < 4, {0}, -{0})
    torch.nn.functional.one_hot({0}.argmax(-1), {0}.shape[-1]) * {0}
    torch.outer({0}.flatten()[:9], {0}.flatten()[-7:])
    torch.block_diag({0}.flatten()[:2], {0}.flatten()[:3])
    torch.diag_embed({0})
    torch.stack([{0}.mean(), {0}.max()])
    {0}.masked_fill(torch.ones_like({0}, dtype=torch.bool).tril(), 0.1)
    torch.pixel_shuffle({0}, 2)
    torch.pixel_unshuffle({0}, 2)
    torch.channel_shuffle({0}, 2)
    torch.tensor(2.0, dtype={0}.dtype) * {0}
    torch.linspace(0, 1, {0}.shape[-1], dtype={0}.dtype) + {0}
    torch.eye({0}.shape[-1], dtype={0}.dtype) @ {0}.unsqueeze(-1)
""")
"""Over one float value with dims."""

IMAGE = _lines("""
    F.max_pool2d({0}, 2)
    F.max_pool2d({0}, 3, 1, 1)
    F.max_pool2d({0}, 3, 2, 1, ceil_mode=True)
    F.avg_pool2d({0}, 2)
    F.avg_pool2d({0}, 3, 1, 1)
    F.avg_pool2d({0}, 3, 2, 1, count_include_pad=False)
    F.adaptive_avg_pool2d({0}, 1)
    F.adaptive_avg_pool2d({0}, (2, 3))
    F.adaptive_max_pool2d({0}, 2)
    F.interpolate({0}, scale_factor=2)
    F.interpolate({0}, scale_factor=2, mode='bilinear')
    F.interpolate({0}, size=(5, 7), mode='bilinear', align_corners=True)
    F.interpolate({0}, size=(4, 4), mode='area')
    F.interpolate({0}, scale_factor=1.5, mode='bicubic')
    {0}.mean((2, 3))
    {0}.mean((2, 3), keepdim=True) * {0}
    {0}.contiguous(memory_format=torch.channels_last)
    {0}.to(memory_format=torch.channels_last) * 2
    F.unfold({0}, 3, padding=1)
    F.group_norm({0}, 2)
    F.instance_norm({0})
    F.local_response_norm({0}, 2)
    {0}.flatten(2).transpose(1, 2)
    {0}.permute(0, 2, 3, 1)
    F.lp_pool2d({0}, 2, 2)
    {0}.sigmoid().mul({0})
    F.batch_norm({0}, None, None, training=True)
    F.interpolate({0}, size=(3, 9), mode='nearest-exact')
    F.pad({0}, (1, 1, 1, 1), mode='reflect')
    F.dropout2d({0}, 0.0)
    {0}.contiguous(memory_format=torch.channels_last).reshape({0}.shape[0], -1)
""")
"""Over one float value of four dims."""

MUTATION = _lines("""
    {0}.add_(1)
    {0}.mul_(0.5)
    {0}.relu_()
    {0}[0] = 0.5
    {0}[..., 0] += 1
    {0}.fill_(0.3)
    {0}.zero_()
    {0}[1:].mul_(2)
    {0}[..., ::2] = -1.0
    {0}.clamp_(-1, 1)
    {0}.tanh_()
    {0}.transpose(0, -1).add_({0}.transpose(0, -1))
    {0}.view(-1)[1:3].zero_()
    {0}.masked_fill_({0} > 1, 0.0)
    {0}.select(-1, 0).copy_({0}.select(-1, -1))
    {0}.index_fill_(0, torch.tensor([0]), 0.7)
    {0}.diagonal().fill_(0.2)
    {0}.sub_({0}.mean())
    {0}.exp_().clamp_(max=5)
    {0}.neg_()
    {0}.t_() if {0}.dim() == 2 else {0}.neg_()
    {0}.flatten().sigmoid_()
    {0}.squeeze_(0)
    {0}.unsqueeze_(0)
""")
"""Over the value that is written to."""

MUTATION_BY = _lines("""
    {0}.add_({1})
    {0}.mul_({1})
    {0}.copy_({1})
    {0}[0].copy_({1}[0])
    {0}[1:].add_({1}[1:])
    {0}.lerp_({1}, 0.2)
    {0}[..., 0] = {1}[..., -1]
    {0}.index_add_(0, torch.zeros({1}.shape[0], dtype=torch.int64), {1})
    {0}.scatter_(0, torch.zeros_like({1}, dtype=torch.int64), {1})
    {0}.addcmul_({1}, {1})
    {0}.scatter_add_(0, torch.zeros_like({1}, dtype=torch.int64), {1})
    {0}.index_put_((torch.tensor([0, 0]),), {1}[:1], accumulate=True)
    {0}.div_({1}.abs() + 1)
    {0}.mT.copy_({1}.mT)
    {0}.masked_scatter_({0} > 0, {1})
""")
"""Over the value that is written to, and another of its shape."""

INTEGER = _lines("""
    {0} + 1
    {0} * 3
    {0} // 2
    {0} % 3
    {0}.sum($D)
    {0}.float() * 0.5
    {0}.cumsum($D)
    {0} == 1
    {0}.to(torch.float32).softmax($D)
    {0}.amax($D)
    {0}.bitwise_and(3)
    {0} << 1
    {0}.to(torch.int32) - 2
    {0}.to(torch.uint8)
    {0}.flip($D)
    {0}.T.contiguous()
    ({0} > 0).float()
    {0}.prod($D)
    {0}.to(torch.int8).neg()
    {0}.argmax($D)
    {0}.clamp(0, 1)
    -{0} // 3
    -{0} % 5
    {0} / 2
    {0}.float().mean($D)
    torch.div(-{0}, 2, rounding_mode='trunc')
    {0}.bool().logical_not()
    {0}.sort($D)[0]
    torch.where({0} > 1, {0}, -{0})
    {0}.bitwise_xor(5)
    {0}.abs().sqrt()
    {0}.to(torch.int16) * 1000
    {0}.sign()
""")
"""Over one value of integers or bools."""

ATTENTION = _lines("""
    F.scaled_dot_product_attention({0}, {0}, {0})
    F.scaled_dot_product_attention({0}, {0}, {0}, is_causal=True)
    ({0} @ {0}.mT / 4).softmax(-1) @ {0}
    (({0} @ {0}.mT) * 0.3 + torch.full(({0}.shape[-2], {0}.shape[-2]), float('-inf')).triu(1)).softmax(-1) @ {0}
    ({0} @ {0}.mT / 4).softmax(-1).sum(-2)
    ({0} @ {0}.mT / 4).sigmoid() @ {0}
    ({0} @ {0}.mT).relu().square() @ {0}
    (lambda s: (s.exp() / (1 + s.exp().sum(-1, keepdim=True))) @ {0})(({0} @ {0}.mT / 8).clamp(-5, 5))
    ({0} @ {0}.mT / 4).logsumexp(-1)
    (({0} @ {0}.mT / 4).softmax(-2)).mT @ {0}
""")
"""Over one float value of rows."""

GATHER = _lines("""
    {0}[{1}.remainder({0}.shape[0])]
    F.embedding({1}.remainder({0}.shape[0]), {0})
    {0}.index_select(0, {1}.remainder({0}.shape[0]).flatten())
    torch.take({0}, {1}.remainder({0}.shape[0]))
    {0}[..., {1}.remainder({0}.shape[-1])]
    F.one_hot({1}.remainder(5), 5).sum(0) + {0}.sum()
""")
"""Over a float value and indices."""

GATHER_ALIKE = _lines("""
    {0}.gather($D, {1}.remainder({0}.shape[$D]))
    torch.zeros_like({0}).scatter_add($D, {1}.remainder({0}.shape[$D]), {0})
    {0}.scatter($D, {1}.remainder({0}.shape[$D]), 0.5)
    torch.take_along_dim({0}, {1}.remainder({0}.shape[$D]), $D)
""")
"""Over a float value and indices of as many dims."""

NORMS = _lines("""
    F.layer_norm({0}, {0}.shape[-1:], {1}, {2})
    F.rms_norm({0}, {0}.shape[-1:], {1} + {2})
    F.batch_norm({0}, None, None, {1}, {2}, training=True)
    F.batch_norm({0}, {1}, {2}.abs() + 0.5)
    F.group_norm({0}, 2, {1}, {2})
""")
"""Over a float value and two vectors: along the last dim in the first two, along the second in the others."""

JOINED = _lines("""
    torch.cat([{0}, {1}], $E)
    torch.stack([{0}, {1}], $E)
    torch.stack([{0}, {1}]).amax(0)
    torch.cat([{0}, {1}], $E).softmax($E)
    F.cosine_similarity({0}, {1}, $E)
    torch.cdist({0}, {1})
""")
"""Over two float values of one shape."""
