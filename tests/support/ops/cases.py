"""One entry per declared op: a torch function, its arguments, and the element types it is tried with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.support.ops.captured_op import Arg, Function

FLOATS = (torch.float32, torch.bfloat16)
INTS = (torch.int64, torch.int32)
NUMBERS = (torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8)
ANY = (*NUMBERS, torch.bool)
SINGLE = (torch.float32,)


@dataclass(frozen=True)
class Case:
    """A function of tensors. `static` cases are not tried with symbolic sizes; `least` is the smallest size that a
    named dim may take (0 where every size is legal)."""

    name: str
    fn: Function
    args: tuple[Arg, ...]
    dtypes: tuple[torch.dtype, ...] = SINGLE
    least: int = 0
    static: bool = False


def _args(specs: Sequence[str | Arg]) -> tuple[Arg, ...]:
    return tuple(s if isinstance(s, Arg) else Arg(s) for s in specs)


def case(name: str, fn: Function, *specs: str | Arg, dtypes: tuple[torch.dtype, ...] = SINGLE, least: int = 0,
         static: bool = False) -> Case:  # fmt: skip
    return Case(name, fn, _args(specs), dtypes, least, static)


def index(dims: str, below: str) -> Arg:
    return Arg(dims, "index", below)


UNARY_FLOAT = (
    "acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 erf erfc sigmoid log log2 log10 log1p"
    " sqrt rsqrt reciprocal"
).split()
UNARY_ANY = "abs sign neg floor ceil trunc round isnan isinf isfinite logical_not signbit sgn".split()
ACTIVATIONS: dict[str, Function] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x, 2, 1),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "threshold": lambda x: F.threshold(x, 0.1, -3),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "tanhshrink": F.tanhshrink,
    "softmin": lambda x: F.softmin(x, 0),
    "glu": lambda x: F.glu(torch.cat([x, x * 2], 1), 1),
}
BINARY = "add sub mul maximum minimum remainder fmod eq ne lt le gt ge fmax fmin".split()
BITS = "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor".split()


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def pointwise() -> list[Case]:
    """Elementwise ops, with broadcasting, scalars and mixed types."""
    out = [case(n, getattr(torch, n), Arg("a b", "unit"), dtypes=FLOATS) for n in UNARY_FLOAT if n != "acosh"]
    out += [case("acosh", lambda x: torch.acosh(x + 1), Arg("a b", "positive"), dtypes=FLOATS)]
    out += [case(n, getattr(torch, n), "a b", dtypes=NUMBERS) for n in UNARY_ANY if n != "neg"]
    out += [
        case("neg", torch.neg, "a b", dtypes=NUMBERS),
        case("bitwise_not", torch.bitwise_not, "a b", dtypes=INTS),
    ]
    out += [case(n, fn, "a b", dtypes=FLOATS) for n, fn in ACTIVATIONS.items()]
    for n in BINARY:
        op = getattr(torch, n)
        safe: Function = (lambda x, y, op=op: op(x, _nonzero(y))) if n in ("remainder", "fmod") else op
        out += [
            case(n, safe, "a b", "a b", dtypes=NUMBERS),
            case(f"{n}_broadcast", safe, "a 1 b", "c 1", dtypes=SINGLE),
        ]
    out += [case(n, getattr(torch, n), "a b", "b", dtypes=(*INTS, torch.bool)) for n in BITS]
    for mode in (None, "floor", "trunc"):
        out.append(
            case(
                f"div_{mode}",
                lambda x, y, m=mode: torch.div(x, _nonzero(y), rounding_mode=m),
                "a b",
                "a b",
                dtypes=NUMBERS,
            )
        )
    out += _scalars() + _mixed() + _created()
    return out


def _scalars() -> list[Case]:
    return [
        case("add_scalar", lambda x: x + 2, "a b", dtypes=ANY),
        case("add_fraction", lambda x: x + 2.5, "a b", dtypes=ANY),
        case("add_alpha", lambda x, y: torch.add(x, y, alpha=3), "a b", "b", dtypes=NUMBERS),
        case("rsub", lambda x: 3 - x, "a b", dtypes=NUMBERS),
        case("pow_square", lambda x: x**2, "a b", dtypes=NUMBERS),
        case("pow_cube", lambda x: x**3, "a b", dtypes=NUMBERS),
        case(
            "pow_roots", lambda x: (x**0.5, x**-0.5, x**-1.0, x**1.7), Arg("a b", "positive"), dtypes=FLOATS
        ),
        case("pow_scalar", lambda x: 2**x, "a b", dtypes=FLOATS),
        case("pow_tensor", torch.pow, Arg("a b", "positive"), "a b", dtypes=FLOATS),
        case("atan2", torch.atan2, "a b", "a b", dtypes=FLOATS),
        case("copysign", torch.copysign, "a b", "a b", dtypes=FLOATS),
        case("clamp", lambda x: torch.clamp(x, -1, 1), "a b", dtypes=NUMBERS),
        case(
            "clamp_half_open", lambda x: (torch.clamp(x, min=0), torch.clamp(x, max=0)), "a b", dtypes=FLOATS
        ),
        case("clamp_tensor", lambda x, y: torch.clamp(x, y, y + 1), "a b", "b", dtypes=FLOATS),
        case(
            "shift",
            lambda x: (x << 2, torch.bitwise_right_shift(x, 1)),
            "a b",
            dtypes=INTS,
        ),
        case("where", torch.where, Arg("a b", "bool"), "a b", "b", dtypes=ANY),
        case("where_scalar", lambda c, x: torch.where(c, x, 1), Arg("a b", "bool"), "a b", dtypes=NUMBERS),
        case("masked_fill", lambda x, m: x.masked_fill(m, 3), "a b", Arg("b", "bool"), dtypes=NUMBERS),
        case(
            "addcmul",
            lambda x, y, z: torch.addcmul(x, y, z, value=2),
            "a b",
            "a b",
            "b",
            dtypes=(*FLOATS, torch.int64),
        ),
        case(
            "addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), "a b", "a b", Arg("b", "positive")
        ),
        case("lerp", lambda x, y: torch.lerp(x, y, 0.3), "a b", "a b"),
        case("lerp_tensor", torch.lerp, "a b", "a b", Arg("a b", "unit")),
        case("prelu", F.prelu, "a b", "1", dtypes=FLOATS),
        case("round_decimals", lambda x: torch.round(x, decimals=2), "a b"),
        case("logaddexp", torch.logaddexp, "a b", "a b"),
        case("nan_to_num", lambda x: torch.nan_to_num(x / 0), "a b"),
    ]


def _mixed() -> list[Case]:
    """Promotion: operands of different types, ranks and kinds."""
    half, single, whole = torch.float16, torch.float32, torch.int64
    return [
        case("int_plus_float", lambda x: x.to(whole) + x, "a b", dtypes=(single, half)),
        case("half_plus_single", lambda x: x.to(half) * x, "a b"),
        case("scalar_tensor_is_weak", lambda x: x.to(half) + x.sum(), "a b"),
        case("bool_plus_int", lambda x: (x > 0) + x.to(torch.int32), "a b"),
        case("byte_times_int8", lambda x: x.to(torch.uint8) * x.to(torch.int8), Arg("a b", "positive")),
        case("int_true_div", lambda x: x / 3, "a b", dtypes=(whole, torch.int32, torch.bool)),
        case("int_sqrt", lambda x: torch.sqrt(x.abs()), "a b", dtypes=INTS),
        case("compare_mixed", lambda x: x.to(torch.int32) < x, "a b"),
        case(
            "casts",
            lambda x: [x.to(t) for t in (torch.int32, torch.int8, torch.bool, torch.float64, half)],
            "a b",
        ),
        case("to_uint8", lambda x: x.abs().to(torch.uint8), "a b"),
    ]


def _created() -> list[Case]:
    return [
        case("full", lambda x: torch.full(x.shape, 2.5) + x, "a b"),
        case("zeros_like", lambda x: torch.zeros_like(x) + torch.ones_like(x), "a b", dtypes=ANY),
        case("arange", lambda x: torch.arange(x.shape[0]), "a b"),
        case(
            "arange_step",
            lambda x: (torch.arange(3, 20, 4), torch.arange(7, -3, -2), torch.arange(0, 2, 0.25)),
            "a",
        ),
        case("arange_float", lambda x: torch.arange(x.shape[0], dtype=x.dtype), "a b"),
        case("tril", lambda x: (torch.tril(x), torch.triu(x, 1)), "a b", dtypes=ANY),
        case("clone", lambda x: x.clone() * 1, "a b"),
        case("scalar", lambda x: x * torch.tensor(3.0), "a b", static=True),
    ]


def reductions() -> list[Case]:
    """Reductions over one dim, several, all, with and without keepdim; scans; norms."""
    out: list[Case] = []
    for n in ("sum", "mean", "prod", "amax", "amin"):
        op: Callable[..., torch.Tensor] = getattr(torch, n)
        types = FLOATS if n == "mean" else NUMBERS
        least = 1 if n in ("amax", "amin") else 0
        out += [
            case(n, lambda x, op=op: op(x, 1), "a b c", dtypes=types, least=least),
            case(f"{n}_keep", lambda x, op=op: op(x, -1, keepdim=True), "a b c", least=least),
        ]
        if n != "prod":
            out.append(case(f"{n}_two", lambda x, op=op: op(x, (0, 2)), "a b c", dtypes=FLOATS, least=least))
    out += [
        case("sum_all", torch.sum, "a b", dtypes=ANY),
        case("sum_none", lambda x: torch.sum(x[0, 0], ()), "a b", least=1),
        case("sum_dtype", lambda x: torch.sum(x, 0, dtype=torch.float64), "a b"),
        case("prod_all", torch.prod, "a b", dtypes=(torch.float32, torch.int64)),
        case("mean_all", torch.mean, "a b", dtypes=FLOATS),
        case("max_min", lambda x: (x.max(), x.min()), "a b", dtypes=ANY, least=1),
        case(
            "any_all",
            lambda x: (x.any(1), x.all(1), x.any(), x.all()),
            "a b",
            dtypes=(torch.bool, torch.int64, torch.float32),
        ),
        case(
            "argmax",
            lambda x: (x.argmax(1), x.argmin(0, keepdim=True), x.argmax()),
            "a b",
            dtypes=NUMBERS,
            least=1,
        ),
        case("max_dim", lambda x: (*x.max(1), *x.min(0, keepdim=True)), "a b", dtypes=NUMBERS, least=1),
        case("max_values", lambda x: x.max(1).values, "a b", least=1),
        case("argmax_ties", lambda x: torch.cat([x, x], 1).argmax(1), "a b", least=1),
        case("argmax_nan", lambda x: torch.where(x > 0.5, torch.nan, x).argmax(1), "a b", least=1),
        case(
            "var",
            lambda x: (x.var(1), x.std(0), x.var((0, 1), correction=0)),
            "a b c",
            dtypes=FLOATS,
            least=2,
        ),
        case("var_mean", lambda x: torch.var_mean(x, (1, 2), keepdim=True), "a b c", least=2),
        case("var_of_one", lambda x: x.var(1), "a b"),
        case("var_large_mean", lambda x: (x + 1e4).var(1, correction=0), "a b", least=2),
        case("logsumexp", lambda x: torch.logsumexp(x, (0, 2)), "a b c", dtypes=FLOATS, least=1),
        case(
            "logsumexp_inf",
            lambda x: torch.logsumexp(torch.where(x > 0, torch.inf, -torch.inf), 1),
            "a b",
            least=1,
        ),
        case("count_nonzero", lambda x: torch.count_nonzero(x, 1), "a b", dtypes=NUMBERS),
        case(
            "norms",
            lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3, torch.inf, -torch.inf)],
            "a b",
            least=1,
        ),
        case(
            "cdist", lambda x, y: (torch.cdist(x, y, 1.0), torch.cdist(x, y, 3.0)), "2 a c", "1 b c", least=1
        ),
        case("cumsum", lambda x: (x.cumsum(1), x.cumsum(0)), "a b c", dtypes=NUMBERS),
        case("cumprod", lambda x: x.cumprod(-1), "a b", dtypes=(torch.float32, torch.int64)),
        case("cummax", lambda x: (*x.cummax(1), *x.cummin(0)), "a b", dtypes=NUMBERS, least=1),
        case(
            "cummax_ties", lambda x: torch.round(torch.where(x > 1, torch.nan, x)).cummax(1), "a b", least=1
        ),
        case("logcumsumexp", lambda x: torch.logcumsumexp(x, 1), "a b"),
    ]
    return out + _norms()


def _norms() -> list[Case]:
    def batch_norm(
        x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        return F.batch_norm(x, m, v, w, b)

    def batch_norm_training(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, w, b, training=True)

    return [
        case("softmax", lambda x: (x.softmax(-1), x.softmax(0)), "a b", dtypes=FLOATS),
        case(
            "softmax_dtype",
            lambda x: x.softmax(-1, dtype=torch.float32),
            "a b",
            dtypes=(torch.float16, torch.int64),
        ),
        case("softmax_masked_row", lambda x: (x - torch.inf).softmax(-1), "a b"),
        case("softmax_scalar", lambda x: x[0, 0].softmax(0), "a b", least=1),
        case("log_softmax", lambda x: (x.log_softmax(-1), x.log_softmax(0)), "a b", dtypes=FLOATS),
        case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), "a b 6", "6", "6", dtypes=FLOATS),
        case("layer_norm_two", lambda x, w: F.layer_norm(x, (4, 6), w), "a 4 6", "4 6"),
        case("layer_norm_plain", lambda x: F.layer_norm(x, x.shape[1:]), "a b", least=1),
        case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w, 1e-5), "a 6", "6", dtypes=FLOATS),
        case("rms_norm_plain", lambda x: F.rms_norm(x, (6,)), "a 6"),
        case(
            "group_norm",
            lambda x, w, b: F.group_norm(x, 3, w, b),
            "a 6 b c",
            "6",
            "6",
            dtypes=FLOATS,
            least=1,
        ),
        case("group_norm_plain", lambda x: F.group_norm(x, 2), "a 4 b", least=1),
        case("instance_norm", F.instance_norm, "a 3 b c", least=2, static=True),
        case("batch_norm", batch_norm, "a 4 b", "4", Arg("4", "positive"), "4", "4", dtypes=SINGLE),
        case("batch_norm_training", batch_norm_training, "a 4 b", "4", "4", least=2),
    ]


def views() -> list[Case]:
    """Views, joins and pads."""
    return [
        case("permute", lambda x: x.permute(2, 0, 1) + 0, "a b c", dtypes=ANY),
        case("transpose", lambda x: x.transpose(0, -1) + 0, "a b c"),
        case("t", lambda x: x.t() * 1, "a b"),
        case("flatten", lambda x: x.flatten(1) + 1, "a b c"),
        case("flatten_all", lambda x: x.reshape(-1) + 1, "a b c"),
        case("merge_two", lambda x: x.reshape(x.shape[0] * x.shape[1], x.shape[2]) + 1, "a b c"),
        case("split_heads", lambda x: x.view(x.shape[0], x.shape[1], 4, 3).transpose(1, 2) + 0, "a b 12"),
        case("unflatten", lambda x: x.reshape(x.shape[0], 3, 2, 2, 1, x.shape[2]) + 1, "a 12 b"),
        case("regroup", lambda x: x.reshape(x.shape[0], 6, 4) + 1, "a 4 6"),
        case("regroup_odd", lambda x: x.reshape(10, 6) + 1, "4 15"),
        case("size_one", lambda x: x.reshape(1, x.shape[0], 1, 12, 1) + 1, "a 1 3 4"),
        case("expand", lambda x: x.expand(3, -1, 5) + 0, "a 1"),
        case("expand_as", lambda x, y: x.expand_as(y) + 0, "1 b", "a b"),
        case("squeeze", lambda x: (x.squeeze(1) + 0, x.unsqueeze(0) + 0, x.squeeze() + 0), "a 1 b", least=2),
        case("select", lambda x: (x[0] + 0, x[:, -1] + 0), "a b", least=1),
        case("slice", lambda x: (x[1:] + 0, x[:, 1:3] + 0, x[::2] + 0, x[:, :-1] + 0), "a b", least=3),
        case("slice_step", lambda x: x[:, 1:8:3] + 0, "a 9"),
        case("slice_beyond", lambda x: x[:, 2:100] + 0, "a 4"),
        case("split", lambda x: x.split([1, 3, 2], 1), "a 6"),
        case("chunk", lambda x: x.chunk(3, 1), "a 6"),
        case("unbind", lambda x: x.unbind(1), "a 3"),
        case("diagonal", lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2, 1, 0)), "5 4", static=True),
        case("diag_embed", torch.diag_embed, "a 4"),
        case("unfold", lambda x: x.unfold(1, 3, 2) + 0, "a 9"),
        case("flip", lambda x: x.flip(0, 1), "a b", dtypes=ANY),
        case("roll", lambda x: (x.roll(2, 1), x.roll((1, -3), (0, 1)), x.roll(3)), "a b", least=1),
        case("repeat", lambda x: x.repeat(2, 1, 3), "a b"),
        case("tile", lambda x: torch.tile(x, (2, 2)), "a b"),
        case("repeat_interleave", lambda x: x.repeat_interleave(3, 1), "a b"),
        case("cat", lambda x, y: torch.cat([x, y, x], 1), "a b", "a c", dtypes=ANY),
        case("cat_mixed", lambda x: torch.cat([x, x.to(torch.int64)], 0), "a b"),
        case("cat_empty", lambda x: torch.cat([torch.zeros(0), x], 0), "a b"),
        case("stack", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], -1)), "a b", "a b"),
        case("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=7.0), "a b", dtypes=FLOATS),
        case("pad_negative", lambda x: F.pad(x, (-1, 2)), "a b", least=2),
        case("pad_reflect", lambda x: F.pad(x, (2, 1), mode="reflect"), "1 a b", least=3),
        case("pad_reflect2", lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), "1 2 a b", least=3),
        case("pad_replicate", lambda x: F.pad(x, (2, 1, 1, 3), mode="replicate"), "1 2 a b", least=1),
        case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 7, 2), "a 9", "a 3", dtypes=ANY),
        case("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, -1), "a 4", "a"),
        case("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y, 1), "4 5", "4", static=True),
        case("setitem", lambda x: _assigned(x), "a b", least=2),
        case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), "a 8 b c"),
        case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), "a 2 6 4", least=1),
        case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "a 6 b c"),
        case("windows", _windows, "a 14 14 3"),
        case("as_strided", lambda x: x.as_strided((3, 4), (1, 2), 1) + 0, "5 4", static=True),
        case(
            "as_strided_of_column_major",
            lambda x: (x.t() * 2).as_strided((3, 4), (1, 2), 1) + 0,
            "5 4",
            static=True,
        ),
        case(
            "as_strided_of_channels_last",
            lambda x: _last(x).as_strided((7, 3), (2, 5), 1) + 0,
            "2 3 4 5",
            static=True,
        ),
        case(
            "as_strided_of_a_part",
            lambda x: (x * 2)[1:, 2].as_strided((2, 6), (7, 1), 3) + 0,
            "5 4",
            static=True,
        ),
        case("as_strided_of_gaps", lambda x: x[:, ::2].as_strided((4, 2), (4, 2), 4) + 0, "5 4", static=True),
        case(
            "as_strided_of_expanded",
            lambda x: (x * 2).expand(3, 4).as_strided((2,), (2,), 1) + 0,
            "4",
            static=True,
        ),
        case("as_strided_copy", lambda x: torch.as_strided_copy(x.t() * 2, (20,), (1,)), "5 4", static=True),
        case(
            "as_strided_scatter",
            lambda x, y: torch.as_strided_scatter(x, y, (2, 3), (9, 2), 3),
            "5 4",
            "2 3",
            static=True,
        ),
        case(
            "as_strided_scatter_column_major",
            lambda x, y: torch.as_strided_scatter(x.t() * 2, y, (3, 2), (1, 4), 1),
            "5 4",
            "3 2",
            static=True,
        ),
        case(
            "as_strided_scatter_symbolic",
            lambda x, y: torch.as_strided_scatter(x, y, y.shape, (x.shape[1],), 0),
            "a b",
            "a",
            least=1,
        ),
    ]


def _last(x: torch.Tensor) -> torch.Tensor:
    """Twice x, channels last."""
    return x.to(memory_format=torch.channels_last) * 2


def _assigned(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:, 0] = 5
    return x


def _windows(x: torch.Tensor) -> torch.Tensor:
    """7x7 window partition."""
    b, h, w, c = x.shape
    return x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)
