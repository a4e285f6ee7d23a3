"""Further entries: indexing, contractions, resampling, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.support.ops.captured_op import Arg, Function
from tests.support.ops.cases import ANY, FLOATS, Case, case, index, pointwise, reductions, views


def indexing() -> list[Case]:
    """Places taken from data."""
    return [
        case(
            "embedding",
            lambda i, w: F.embedding(i, w),
            index("a b", "9"),
            "9 4",
            dtypes=(torch.float32, torch.bfloat16),
        ),
        case("index_select", lambda x, i: x.index_select(1, i), "a b", index("c", "b"), dtypes=ANY, least=1),
        case("gather", lambda x, i: x.gather(1, i), "a b", index("a c", "b"), dtypes=ANY, least=1),
        case(
            "take_along",
            lambda x, i: torch.take_along_dim(x, i, 1),
            "a b",
            index("a c", "b"),
            least=1,
            static=True,
        ),
        case(
            "bucketize",
            lambda x, e: [torch.bucketize(x, e.cumsum(0) - 1, right=r) for r in (True, False)],
            "a b",
            Arg("4", "unit"),
        ),
        case("take", lambda x, i: x.take(i), "4 5", Arg("a", "signed", "20")),
        case("index_one", lambda x, i: x[i], "b c", Arg("a", "signed", "b"), dtypes=ANY, least=1),
        case(
            "index_two",
            lambda x, i, j: x[i, j],
            "b c d",
            Arg("a 1", "signed", "b"),
            Arg("3", "signed", "c"),
            least=1,
        ),
        case("index_middle", lambda x, i: x[:, i], "a b c", Arg("d 2", "signed", "b"), least=1),
        case(
            "index_apart",
            lambda x, i, j: x[i, :, j],
            "a b c",
            Arg("d", "signed", "a"),
            Arg("d", "signed", "c"),
            least=1,
        ),
        case("index_int32", lambda x, i: x[i.to(torch.int32)], "b c", index("a", "b"), least=1),
        case(
            "grid_sample",
            lambda x, g: F.grid_sample(x, torch.tanh(g) * 1.2, align_corners=False),
            "2 3 a b",
            "2 4 5 2",
            least=2,
        ),
        case(
            "grid_sample_border",
            lambda x, g: F.grid_sample(x, g, "bilinear", "border", True),
            "2 3 4 5",
            "2 a b 2",
            least=1,
        ),
        case(
            "grid_sample_nearest",
            lambda x, g: F.grid_sample(x, g, "nearest", align_corners=True),
            "2 3 4 5",
            "2 a b 2",
            least=1,
        ),
    ]


def contractions() -> list[Case]:
    """Matmuls, convolutions, attention."""
    return [
        case("mm", torch.mm, "a b", "b c", dtypes=(*FLOATS, torch.int64)),
        case("bmm", torch.bmm, "d a b", "d b c", dtypes=FLOATS),
        case("matmul", torch.matmul, "2 3 a b", "3 b c", least=1),
        case("matvec", lambda x, y: (torch.mv(x, y), torch.dot(y, y)), "a b", "b"),
        case("linear", F.linear, "d a b", "c b", "c", dtypes=FLOATS, least=1),
        case("addmm", lambda z, x, y: torch.addmm(z, x, y, beta=0.5, alpha=2), "c", "a b", "b c"),
        case("addmv", lambda z, x, y: torch.addmv(z, x, y, beta=0.5), "a", "a b", "b"),
        case("baddbmm", lambda z, x, y: torch.baddbmm(z, x, y, beta=0), "d a c", "d a b", "d b c"),
        case("einsum", lambda x, y: torch.einsum("bik,bjk->bij", x, y), "d a b", "d c b", least=1),
        case("outer", torch.outer, "a", "b"),
        case("conv1d", lambda x, w, b: F.conv1d(x, w, b, 2, 1), "a 4 b", "6 4 3", "6", least=3),
        case(
            "conv2d",
            lambda x, w, b: F.conv2d(x, w, b, padding=1),
            "2 3 a b",
            "4 3 3 3",
            "4",
            dtypes=FLOATS,
            least=1,
        ),
        case(
            "conv2d_all",
            lambda x, w: F.conv2d(x, w, None, (2, 1), (2, 0), (1, 2), 2),
            "a 4 9 8",
            "6 2 3 2",
            least=1,
        ),
        case(
            "conv2d_depthwise", lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 4), "1 4 a b", "4 1 3 3", least=1
        ),
        case("conv3d", lambda x, w: F.conv3d(x, w, padding=1), "1 2 3 4 5", "3 2 2 3 3", static=True),
        case(
            "conv_transpose1d",
            lambda x, w: F.conv_transpose1d(x, w, None, 3, 1, 1),
            "a 4 b",
            "4 2 3",
            least=2,
        ),
        case(
            "conv_transpose2d",
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2, (1, 2)),
            "1 4 a b",
            "4 3 3 3",
            "6",
            least=2,
        ),
        *_attentions(),
    ]


def _attentions() -> list[Case]:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor, **how: object
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, **how)  # type: ignore[arg-type]

    q, k = "2 4 a 8", "2 4 b 8"
    return [
        case("attention", attend, q, k, k, dtypes=FLOATS, least=1),
        case(
            "attention_causal",
            lambda q, k, v: attend(q, k, v, is_causal=True),
            q,
            "2 4 a 8",
            "2 4 a 8",
            least=1,
        ),
        case("attention_scale", lambda q, k, v: attend(q, k, v, scale=0.3), q, k, k, least=1),
        case("attention_bias", attend, q, k, k, "a b", least=1),
        case("attention_mask", attend, q, k, k, Arg("2 1 a b", "bool"), least=1),
        case(
            "attention_nothing",
            lambda q, k, v: attend(q, k, v, torch.zeros(3, 5, dtype=torch.bool)),
            "1 2 3 8",
            "1 2 5 8",
            "1 2 5 8",
            static=True,
        ),
        case(
            "attention_grouped",
            lambda q, k, v: attend(q, k, v, enable_gqa=True),
            q,
            "2 2 b 8",
            "2 2 b 8",
            least=1,
        ),
    ]


def resampling() -> list[Case]:
    """Pooling and interpolation."""

    def resize(mode: str, **how: object) -> Function:
        return lambda x: F.interpolate(x, mode=mode, **how)  # type: ignore[arg-type]

    return [
        case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), "2 3 a b", dtypes=FLOATS, least=1),
        case(
            "max_pool2d_index",
            lambda x: F.max_pool2d(x, (2, 3), (1, 2), (0, 1), return_indices=True),
            "2 3 a b",
            least=2,
        ),
        case("max_pool2d_dilated", lambda x: F.max_pool2d(x, 3, 1, 1, 2), "1 2 7 8"),
        case("max_pool2d_ceil", lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), "1 2 5 6"),
        case("max_pool1d", lambda x: F.max_pool1d(x, 2), "2 3 6", static=True),
        case("max_pool3d", lambda x: F.max_pool3d(x, 2), "1 2 4 4 5"),
        case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), "2 3 a b", dtypes=FLOATS, least=1),
        case("avg_pool2d_valid", lambda x: F.avg_pool2d(x, 2), "2 3 b c", least=2),
        case(
            "avg_pool2d_exclude",
            lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            "2 3 a b",
            least=1,
        ),
        case("avg_pool2d_ceil", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), "1 2 6 7"),
        case("avg_pool2d_divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), "1 2 6 7"),
        case("avg_pool_other", lambda x: (F.avg_pool1d(x[0, 0], 2), F.avg_pool3d(x, 2)), "1 2 4 4 5"),
        case("adaptive_avg_one", lambda x: F.adaptive_avg_pool2d(x, 1), "2 3 a b", dtypes=FLOATS, least=1),
        case("adaptive_avg", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), "2 3 7 5"),
        case("adaptive_avg_even", lambda x: F.adaptive_avg_pool2d(x, (2, 4)), "2 3 6 8"),
        case("adaptive_avg_1d", lambda x: F.adaptive_avg_pool1d(x, 3), "2 3 7"),
        case("adaptive_max", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), "2 3 7 5"),
        case("nearest", resize("nearest", scale_factor=2), "1 2 a b", dtypes=FLOATS, least=1),
        case("nearest_sizes", resize("nearest", size=(7, 5)), "1 2 3 4"),
        case("nearest_down", resize("nearest", scale_factor=0.5), "1 2 8 6"),
        case("nearest_exact", resize("nearest-exact", size=(7, 5)), "1 2 3 4"),
        case("nearest_1d", resize("nearest", scale_factor=3), "2 3 a", least=1),
        case(
            "bilinear",
            resize("bilinear", scale_factor=2, align_corners=False),
            "1 2 a b",
            dtypes=FLOATS,
            least=1,
        ),
        case("bilinear_corners", resize("bilinear", size=(7, 9), align_corners=True), "1 2 a b", least=1),
        case("bilinear_sizes", resize("bilinear", size=(7, 3), align_corners=False), "1 2 4 5"),
        case("bilinear_fraction", resize("bilinear", scale_factor=1.5, align_corners=False), "1 2 4 6"),
        case("linear_1d", resize("linear", scale_factor=2, align_corners=False), "2 3 a", least=1),
        case("trilinear", resize("trilinear", size=(3, 4, 5), align_corners=False), "1 2 2 3 4"),
        case("bicubic", resize("bicubic", scale_factor=2, align_corners=False), "1 2 a b", least=1),
        case("bicubic_corners", resize("bicubic", size=(5, 9), align_corners=True), "1 2 4 6"),
    ]


def losses() -> list[Case]:
    """Losses; their reductions are mean and sum."""

    def named(name: str, fn: Function, *specs: str | Arg) -> list[Case]:
        return [
            case(f"{name}_{how}", lambda *a, how=how: fn(*a, reduction=how), *specs, least=1)
            for how in ("mean", "sum", "none")
        ]

    return [
        *named("mse", F.mse_loss, "a b", "a b"),
        *named("l1", F.l1_loss, "a b", "a b"),
        *named("smooth_l1", F.smooth_l1_loss, "a b", "a b"),
        *named("huber", F.huber_loss, "a b", "a b"),
        *named("kl_div", F.kl_div, "a b", Arg("a b", "unit")),
        *named("bce", F.binary_cross_entropy, Arg("a b", "unit"), Arg("a b", "unit")),
        *named("bce_logits", F.binary_cross_entropy_with_logits, "a b", Arg("a b", "unit")),
        *named("nll", F.nll_loss, "a b", index("a", "b")),
        *named("cross_entropy", F.cross_entropy, "a b", index("a", "b")),
        case("nll_2d", F.nll_loss, "a 5 b c", index("a b c", "5"), least=1),
        case("nll_ignore", lambda x, y: F.nll_loss(x, y, ignore_index=2), "6 5", index("6", "5")),
        case(
            "cross_entropy_smooth",
            lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
            "a b",
            index("a", "b"),
            least=1,
        ),
        case(
            "cross_entropy_weight",
            lambda x, y, w: F.cross_entropy(x, y, w),
            "6 5",
            index("6", "5"),
            Arg("5", "positive"),
        ),
    ]


CASES = [*pointwise(), *reductions(), *views(), *indexing(), *contractions(), *resampling(), *losses()]
