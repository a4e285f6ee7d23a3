"""Functions: views, padding, resampling, indices, reductions, scans, sorting, products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gradients.program import Program, function

IMAGE = "B,6,10,8"


def _views(x: Tensor) -> Tensor:
    y = x.transpose(1, 2).reshape(x.shape[0], -1, 4)[:, 1:-1]
    return y.unfold(1, 3, 2).permute(0, 3, 1, 2).flatten(2).unsqueeze(1).expand(-1, 2, -1, -1) * 2


def _strided(x: Tensor) -> Tensor:
    y = x.contiguous()
    return y.as_strided((y.shape[0], 5, 3), (y.stride(0), 4, 2), 1) * 3


def _written(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, 1:3] = y[:, :2]
    z[:, 0].mul_(2)
    z[:, -1] += y[:, 0]
    return z


def _where(x: Tensor, m: Tensor) -> Tensor:
    return torch.where(m, x.exp(), -x) + x.masked_fill(m, 0.0)


def _mixture(x: Tensor, w: Tensor) -> Tensor:
    scores, chosen = (x @ w).softmax(-1).topk(2, -1)
    return torch.zeros_like(x[..., :5]).scatter(-1, chosen, scores / scores.sum(-1, keepdim=True))


VIEWS: tuple[Program, ...] = (
    function("views of views", _views, "B,6,8"),
    function("as_strided", _strided, "B,6,8"),
    function("all as one row", lambda x: x.as_strided((x.numel(),), (1,)) * 2, "B,6,8"),
    function(
        "as_strided scattered",
        lambda x, y: torch.as_strided_scatter(x, y, (6, 4), (8, 2), 1),
        "9,8",
        "6,4",
        fixed=True,
    ),
    function("chunks", lambda x: tuple(c * (k + 1) for k, c in enumerate(x.chunk(3, 1))), "B,9,4"),
    function(
        "split and joined", lambda x: torch.cat([c.sin() for c in x.split([2, 3, 4], 1)][::-1], 1), "B,9,4"
    ),
    function("stacked", lambda x, y: torch.stack([x, y, x * y], 2), "B,5,6", "B,5,6"),
    function("flipped and rolled", lambda x: x.flip(1).roll((2, -1), (1, 2)) * x, "B,5,6"),
    function("rotated", lambda x: x.rot90(1, (2, 3)).contiguous() ** 2, IMAGE),
    function("repeated", lambda x: x.repeat(1, 2, 3).sin(), "B,5,6"),
    function("repeated by element", lambda x: x.repeat_interleave(3, 1) * 2, "B,5,6"),
    function("expanded", lambda x: x[:, :, None].expand(-1, -1, 7) * 3, "B,5"),
    function("diagonals", lambda x: (x.diagonal(0, 1, 2) * 2, x.diagonal(1, 1, 2).cos()), "B,6,6"),
    function("on the diagonal", lambda x: torch.diag_embed(x) @ torch.diag_embed(x, 0), "B,6"),
    function("triangles", lambda x: x.tril(1) * x.triu(-1), "B,6,7"),
    function("channels last inside", lambda x: x.to(memory_format=torch.channels_last).relu() * 2, IMAGE),
    function(
        "channels last and back",
        lambda x: (x.contiguous(memory_format=torch.channels_last) + 1).contiguous().view(x.shape[0], -1),
        IMAGE,
    ),
    function("pixel shuffle", lambda x: F.pixel_shuffle(x.sin(), 2), "B,8,3,5"),
    function("pixel unshuffle", lambda x: F.pixel_unshuffle(x.sin(), 2), "B,3,6,4"),
    function("channel shuffle", lambda x: F.channel_shuffle(x, 3) * 2, IMAGE),
    function("unfold", lambda x: F.unfold(x, 3, padding=1, stride=2) * 2, IMAGE),
    function("fold", lambda x: F.fold(x, (6, 7), (3, 2), padding=1) * 2, "B,12,48"),
    function("window", lambda x: x.unfold(1, 4, 2).mean(-1), "B,12,3"),
    function("outputs that are views", lambda x: ((y := x * 2), y.view(-1), y.transpose(1, 2)), "B,5,6"),
    function("the input again", lambda x: (x, x.view(-1) * 2), "B,5,6"),
    *(
        function(f"pad {m}", lambda x, m=m: F.pad(x, (2, 1, 1, 3), mode=m) * 2, IMAGE)
        for m in ("constant", "reflect", "replicate", "circular")
    ),
    function(
        "pad 1d", lambda x: F.pad(x, (3, 2), mode="reflect") * F.pad(x, (3, 2), mode="replicate"), "B,4,9"
    ),
    function("pad 3d", lambda x: F.pad(x, (1, 1, 2, 0, 1, 2), mode="replicate").sin(), "B,2,4,5,3"),
    function("cropped", lambda x: F.pad(x, (-1, -2, 1, -1)) * 2, IMAGE),
    *(
        function(f"interpolate {m}", lambda x, m=m: F.interpolate(x, scale_factor=1.7, mode=m), IMAGE)
        for m in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    ),
    function(
        "interpolate aligned", lambda x: F.interpolate(x, (7, 13), mode="bilinear", align_corners=True), IMAGE
    ),
    function(
        "interpolate smoothed",
        lambda x: F.interpolate(x, (4, 5), mode="bilinear", antialias=True),
        IMAGE,
        plain=True,
    ),
    function("interpolate linear", lambda x: F.interpolate(x, 17, mode="linear"), "B,4,9"),
    function(
        "interpolate trilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), "B,2,3,4,3"
    ),
    function(
        "grid sample",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        "B,3,6,7",
        "B,4,5,2",
        plain=True,
    ),
    function(
        "affine grid",
        lambda x, t: F.grid_sample(
            x,
            F.affine_grid(t, [x.shape[0], 3, 4, 5], align_corners=True),
            padding_mode="border",
            align_corners=True,
        ),
        "B,3,6,7",
        "B,2,3",
        plain=True,
    ),
)

INDICES: tuple[Program, ...] = (
    function("gather", lambda x, i: x.gather(1, i) * 2, "B,9,4", "B,6,4:i9"),
    function(
        "scatter", lambda x, i, y: x.scatter(1, i.sort(1)[0][:, :1], y[:, :1]), "B,9,4", "B,6,4:i9", "B,6,4"
    ),
    function("scatter add", lambda x, i, y: x.scatter_add(1, i, y), "B,9,4", "B,6,4:i9", "B,6,4"),
    *(
        function(
            f"scatter reduce {r}",
            lambda x, i, y, r=r: x.scatter_reduce(1, i, y, r),
            "B,9,4",
            "B,6,4:i9",
            "B,6,4",
        )
        for r in ("sum", "mean", "amax", "prod")
    ),
    function("index select", lambda x, i: x.index_select(1, i) * 2, "B,9,4", "6:i9"),
    function("index add", lambda x, i, y: x.index_add(1, i, y, alpha=2), "B,9,4", "6:i9", "B,6,4"),
    function(
        "index copy",
        lambda x, y: x.index_copy(1, torch.tensor([4, 0, 2], device=x.device), y),
        "B,9,4",
        "B,3,4",
    ),
    function(
        "index put",
        lambda x, i, y: x.index_put(
            (torch.arange(x.shape[0], device=x.device)[:, None], i), y, accumulate=True
        ),
        "B,9,4",
        "B,6:i9",
        "B,6,4",
    ),
    function("by lists", lambda x, i, j: x[:, i, j] * 2 + x[:, i, 0], "B,9,4", "5:i9", "5:i4"),
    function("by a mask", lambda x, m: x * m + x.masked_fill(~m, 3.0), "B,9,4", "B,9,4:b"),
    function("masked scatter", lambda x, m, y: x.masked_scatter(m, y), "B,9,4", "B,9,4:b", "B,9,4"),
    function("where", _where, "B,9,4", "B,9,1:b"),
    function("take along", lambda x, i: torch.take_along_dim(x, i, 1), "B,9,4", "B,3,4:i9"),
    function("take", lambda x, i: x.take(i) * 2, "B,9,4", "7:i9"),
    function("written in place", _written, "B,5,6", "B,5,6"),
    function("slice scattered", lambda x, y: torch.slice_scatter(x, y, 1, 2, 8, 2) * 2, "B,9,4", "B,3,4"),
    function("select scattered", lambda x, y: torch.select_scatter(x, y, 1, 3) * 2, "B,9,4", "B,4"),
    function("one hot", lambda x, i: x * F.one_hot(i, 9).to(x.dtype), "B,9", "B:i9"),
    function("embedding by hand", lambda i, w: w[i] * 2, "B,5:i7", weights=((7, 6),)),
)

FOLDS: tuple[Program, ...] = (
    function("sums", lambda x: (x.sum(1), x.mean((0, 2)), x.sum()), "B,7,9"),
    function("var", lambda x: (x.var(1), x.std(2), torch.var(x, dim=(1, 2), correction=0)), "B,7,9"),
    function("var_mean", lambda x: torch.var_mean(x, 2, keepdim=True), "B,7,9"),
    function(
        "norms", lambda x: (x.norm(dim=1), x.norm(1, 2), x.norm(float("inf"), 1), x.norm(3, 2)), "B,7,9"
    ),
    function("normalised", lambda x: F.normalize(x, dim=1) * 2, "B,7,9"),
    function("cosine similarity", lambda x, y: F.cosine_similarity(x, y, 1), "B,7,9", "B,7,9"),
    function("pairwise distance", lambda x, y: F.pairwise_distance(x, y), "B,9", "B,9"),
    function("cdist", lambda x, y: torch.cdist(x, y), "B,5,9", "B,6,9", plain=True),
    function("softmax", lambda x: x.softmax(1) * x.softmax(2), "B,7,9"),
    function("log softmax", lambda x: x.log_softmax(1) + F.softmin(x, 2), "B,7,9"),
    function("logsumexp", lambda x: (x.logsumexp(1), x.logsumexp((1, 2))), "B,7,9"),
    function("extrema", lambda x: (x.amax(1), x.amin((1, 2)), x.max(), x.max(2)[0], x.min(1)[0]), "B,7,9"),
    function("aminmax", lambda x: x.aminmax(dim=1)[0] * x.aminmax(dim=1)[1], "B,7,9"),
    function("product", lambda x: (x.prod(1), x.prod()), "B,5,2"),
    function("cumsum", lambda x: x.cumsum(1) * x.cumsum(2), "B,7,9"),
    function("cumprod", lambda x: x.cumprod(1), "B,7,9:p"),
    function("logcumsumexp", lambda x: x.logcumsumexp(1), "B,7,9"),
    function("cummax", lambda x: x.cummax(1)[0] * 2, "B,7,9"),
    function("cummin", lambda x: x.cummin(2)[0] * 2, "B,7,9"),
    function("sort", lambda x: x.sort(1)[0] * torch.arange(7, device=x.device)[:, None], "B,7,9"),
    function("topk", lambda x: x.topk(3, 2)[0] * 2, "B,7,9"),
    function("median", lambda x: (x.median(1)[0], x.kthvalue(2, 2)[0]), "B,7,9"),
    function("mixture of experts", _mixture, "B,7,9", weights=((9, 5),)),
    function("quantile", lambda x: x.quantile(0.3, 1), "B,7,9", plain=True),
    function("trace", lambda x: x.diagonal(0, 1, 2).sum(-1) * 2, "B,6,6"),
    function("differences", lambda x: x.diff(dim=1) * 2, "B,7,9"),
    function("renorm", lambda x: x.renorm(2, 1, 1.0), "B,7,9", plain=True),
)

ARITHMETIC: tuple[Program, ...] = (
    function(
        "smooth functions",
        lambda x: (x.exp(), x.log(), x.sqrt(), x.rsqrt(), x.reciprocal(), x.log1p(), x.expm1()),
        "B,30:p",
    ),
    function(
        "trigonometric",
        lambda x: (x.sin(), x.cos(), x.tan(), x.asin(), x.acos(), x.atan(), x.sinh(), x.cosh()),
        "B,30:u",
    ),
    function(
        "special",
        lambda x: (x.erf(), x.erfc(), x.lgamma(), x.digamma(), x.erfinv(), torch.special.i0(x)),
        "B,30:u",
    ),
    function("powers", lambda x, y: (x**2, x**3, x**0.5, x**-1, 2**x, x**y), "B,30:p", "B,30"),
    function(
        "two operands",
        lambda x, y: (
            torch.atan2(x, y),
            torch.hypot(x, y),
            torch.maximum(x, y),
            torch.minimum(x, y),
            torch.logaddexp(x, y),
        ),
        "B,30",
        "B,30",
    ),
    function(
        "remainders",
        lambda x, y: (torch.fmod(x, y), torch.remainder(x, y), x.div(y, rounding_mode="floor") + x),
        "B,30",
        "B,30:p",
    ),
    function("clamped", lambda x, y: (x.clamp(-0.5, 0.7), x.clamp(min=y), x.clamp_max(0.1)), "B,30", "B,30"),
    function(
        "mixed by lerp",
        lambda x, y, t: torch.lerp(x, y, t) + torch.addcmul(x, y, t) + torch.addcdiv(x, y, t, value=2),
        "B,30",
        "B,30",
        "B,30:u",
    ),
    function("of steps", lambda x: x.floor() + x.round() * x + x.sign() * x + x.abs() + x.frac(), "B,30"),
    function("broadcast", lambda x, y, z: x * y + z, "B,5,1", "B,1,7", "7"),
    function("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), "B,5,6", "B,6,7"),
    function("einsum of three", lambda x, y, z: torch.einsum("bi,bj,bij->b", x, y, z), "B,5", "B,6", "B,5,6"),
    function(
        "products",
        lambda x, w: ((x @ w), torch.baddbmm(x[..., :4], x, x.mT[..., :4]) * 2),
        "B,5,5",
        weights=((5, 7),),
    ),
    function(
        "vectors",
        lambda x, y: (
            torch.linalg.vecdot(x, y),
            torch.cross(x[:, :3], y[:, :3], dim=1),
            torch.outer(x[:, 0], y[0]),
        ),
        "B,6",
        "B,6",
    ),
    function("matrix powers", lambda x: torch.linalg.matrix_power(x, 3), "B,4,4", plain=True),
    function("tensordot", lambda x, w: torch.tensordot(x, w, 2), "B,5,6", weights=((5, 6, 4),)),
    function(
        "determinant", lambda x: torch.linalg.det(x) + torch.linalg.inv(x).sum((1, 2)), "B,4,4", plain=True
    ),
    function("complex in between", lambda x: torch.fft.rfft(x, dim=1).abs(), "B,8,3", plain=True),
    function(
        "types in between", lambda x: (x.half().float() * 2, x.double() * x, x.bfloat16()), "B,30", plain=True
    ),
)

PROGRAMS = (*VIEWS, *INDICES, *FOLDS, *ARITHMETIC)
