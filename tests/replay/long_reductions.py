"""Programs whose reductions are long: those that are taken in parts, which the usual corpus is too small for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Long = tuple[
    str, Callable[..., object], Callable[[], tuple[Tensor, ...]], Mapping[str, Mapping[int, str]] | None
]
"""Name, program, inputs, and which of their dims are symbols."""
HALF, DOUBLE = torch.float16, torch.float64


def _unfilled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


def decode_received(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
    s = (q @ k.transpose(-1, -2) * 0.125).softmax(-1)
    return (s @ v, s.sum(1))


def mixed(x: Tensor) -> Tensor | tuple[Tensor, ...]:
    m = x.mean(1, keepdim=True)
    return (x.mean(1), (x - m).square().mean(1))


def mixed_columns(x: Tensor) -> Tensor | tuple[Tensor, ...]:
    m = x.mean(0, keepdim=True)
    return (m, (x - m).square().sum(0))


def mixed_back(x: Tensor) -> Tensor | tuple[Tensor, ...]:
    m = x.mean(0)
    return (m, (x - m).square().sum(0, keepdim=True))


def leaving(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
    s = (q @ k.transpose(-1, -2) * 0.125).softmax(-1)
    return (s @ v, s)


def received(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
    s = (q @ k.transpose(-1, -2) * 0.125).softmax(-1)
    return (s @ v, s.sum(-2))


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor | tuple[Tensor, ...]:
    s = q @ k.transpose(-1, -2) * 0.125
    s = s.masked_fill(torch.arange(k.shape[-2]) >= n[:, None, None, None], float("-inf"))
    return s.softmax(-1) @ v


LONG: tuple[Long, ...] = (
    ("sum", lambda x: x.sum(), lambda: (_unfilled(1 << 21),), None),
    ("sum-odd", lambda x: x.sum(), lambda: (_unfilled(1000003),), None),
    ("sum-rows", lambda x: x.sum(-1), lambda: (_unfilled(3, 300001),), None),
    ("sum-squares", lambda x: (x * x).sum(), lambda: (_unfilled(1 << 20),), None),
    ("sum-half", lambda x: x.float().sum(), lambda: (_unfilled(1 << 20, dtype=HALF),), None),
    ("sum-double", lambda x: x.sum(), lambda: (_unfilled(1 << 19, dtype=DOUBLE),), None),
    ("sum-int", lambda x: x.sum(), lambda: (torch.empty(1 << 20, dtype=torch.int64),), None),
    ("mean", lambda x: x.mean(), lambda: (_unfilled(1 << 20),), None),
    ("sum-dynamic", lambda x: x.sum(), lambda: (_unfilled(1 << 20),), {"x": {0: "n"}}),
    ("rows-dynamic", lambda x: x.sum(-1), lambda: (_unfilled(4, 1 << 18),), {"x": {0: "b", 1: "n"}}),
    ("sum-columns", lambda x: x.sum(0), lambda: (_unfilled(65537, 24),), None),
    ("sum-columns-dynamic", lambda x: x.sum(0), lambda: (_unfilled(65537, 24),), {"x": {0: "n"}}),
    ("sum-nhw", lambda x: x.sum((0, 2, 3)), lambda: (_unfilled(16, 32, 56, 56),), None),
    (
        "sum-nhw-last",
        lambda x: x.sum((0, 2, 3)),
        lambda: (_unfilled(16, 32, 56, 56).to(memory_format=torch.channels_last),),
        None,
    ),
    ("product", lambda x: x.prod(), lambda: (_unfilled(1 << 18),), None),
    ("max", lambda x: x.amax(-1), lambda: (_unfilled(2, 400000),), None),
    ("min", lambda x: x.min(), lambda: (_unfilled(1 << 19),), None),
    ("argmax", lambda x: x.argmax(-1), lambda: (_unfilled(2, 400001),), None),
    ("argmax-value", lambda x: x.max(-1), lambda: (_unfilled(2, 1 << 18),), None),
    ("argmin-columns", lambda x: x.argmin(0), lambda: (_unfilled(1 << 16, 4),), None),
    ("argmax-dynamic", lambda x: x.argmax(-1), lambda: (_unfilled(2, 1 << 18),), {"x": {1: "n"}}),
    ("any", lambda x: (x > 0).any(), lambda: (_unfilled(1 << 20),), None),
    ("all", lambda x: (x > 0).all(0), lambda: (_unfilled(1 << 16, 8),), None),
    ("norm", lambda x: x / x.norm(), lambda: (_unfilled(1 << 20),), None),
    ("logsumexp", lambda x: x.logsumexp(-1), lambda: (_unfilled(2, 1 << 18),), None),
    (
        "dot-bias",
        lambda x, y: (x[:, None] * y[None]).sum(-1),
        lambda: (
            _unfilled(4, 1 << 16),
            _unfilled(4, 1 << 16),
        ),
        None,
    ),
    (
        "gradient-bias",
        lambda x, y: (x * y).sum((0, 1)),
        lambda: (
            _unfilled(64, 512, 96),
            _unfilled(64, 512, 96),
        ),
        None,
    ),
    ("var-mean", lambda x: torch.var_mean(x, (1, 2)), lambda: (_unfilled(2, 1024, 1024),), None),
    ("var-mean-keep", lambda x: torch.var_mean(x, -1, keepdim=True), lambda: (_unfilled(2, 300007),), None),
    ("var-mean-columns", lambda x: torch.var_mean(x, 0), lambda: (_unfilled(1 << 16, 48),), None),
    ("var-columns-odd", lambda x: torch.var_mean(x, 0, keepdim=True), lambda: (_unfilled(50021, 48),), None),
    (
        "var-columns-half",
        lambda x: torch.var_mean(x.float(), 0),
        lambda: (_unfilled(1 << 15, 48, dtype=HALF),),
        None,
    ),
    (
        "var-columns-dynamic",
        lambda x: torch.var_mean(x, 0),
        lambda: (_unfilled(1 << 16, 48),),
        {"x": {0: "n"}},
    ),
    ("var-few-columns", lambda x: torch.var_mean(x, 0), lambda: (_unfilled(256, 4096),), None),
    ("var-rows-dynamic", lambda x: torch.var_mean(x, -1), lambda: (_unfilled(2, 1 << 18),), {"x": {1: "n"}}),
    ("var-nhw", lambda x: torch.var_mean(x, (0, 2, 3)), lambda: (_unfilled(16, 32, 28, 28),), None),
    (
        "var-nhw-dynamic",
        lambda x: torch.var_mean(x, (0, 2, 3)),
        lambda: (_unfilled(16, 32, 28, 28),),
        {"x": {0: "n"}},
    ),
    (
        "var-nhw-last",
        lambda x: torch.var_mean(x, (0, 2, 3)),
        lambda: (_unfilled(16, 32, 56, 56).to(memory_format=torch.channels_last),),
        None,
    ),
    (
        "var-digits",
        lambda x: torch.var_mean(x, (0, 2, 3)),
        lambda: (_unfilled(16, 6, 57, 57),),
        {"x": {0: "n", 2: "h", 3: "w"}},
    ),
    (
        "var-digits-keep",
        lambda x: torch.var_mean(x, (0, 2, 3), keepdim=True),
        lambda: (_unfilled(5, 6, 130, 130),),
        {"x": {0: "n", 2: "h"}},
    ),
    ("var-digits-known", lambda x: torch.var_mean(x, (0, 2)), lambda: (_unfilled(33, 6, 7000),), None),
    (
        "var-computed",
        lambda x: torch.var(torch.relu(x + 1), (0, 2, 3)),
        lambda: (_unfilled(40, 3, 190, 170),),
        None,
    ),
    ("var-double", lambda x: torch.var_mean(x.double(), 1), lambda: (_unfilled(3, 90000),), None),
    ("std-all", lambda x: x.std(), lambda: (_unfilled(1300, 1299),), None),
    ("sum-float16", lambda x: x.sum(), lambda: (_unfilled(1 << 20, dtype=HALF),), None),
    (
        "mean-rows-half-dynamic",
        lambda x: x.mean(-1),
        lambda: (_unfilled(4, 1 << 18, dtype=HALF),),
        {"x": {1: "n"}},
    ),
    ("max-columns-dynamic", lambda x: x.amax(0), lambda: (_unfilled(1 << 16, 8),), {"x": {0: "n"}}),
    (
        "sum-nhw-dynamic",
        lambda x: x.sum((0, 2, 3)),
        lambda: (_unfilled(16, 32, 56, 56),),
        {"x": {0: "n", 2: "h", 3: "w"}},
    ),
    (
        "softmax-min",
        lambda x: (x.amin(-1, keepdim=True) - x).exp().sum(-1),
        lambda: (_unfilled(2, 200003),),
        None,
    ),
    ("two-sums", lambda x: (x.sum(-1, keepdim=True) * x).sum(-1), lambda: (_unfilled(2, 1 << 18),), None),
    (
        "dot-odd",
        lambda x, y: (x * y).sum(-1),
        lambda: (
            _unfilled(4, 65539),
            _unfilled(4, 65539),
        ),
        None,
    ),
    (
        "decode-odd",
        decode,
        lambda: (
            _unfilled(1, 8, 1, 64),
            _unfilled(1, 8, 8193, 64),
            _unfilled(1, 8, 8193, 64),
        ),
        None,
    ),
    (
        "decode-dynamic",
        decode,
        lambda: (
            _unfilled(1, 8, 1, 64),
            _unfilled(1, 8, 8192, 64),
            _unfilled(1, 8, 8192, 64),
        ),
        {"k": {2: "t"}, "v": {2: "t"}},
    ),
    (
        "decode-received-odd",
        decode_received,
        lambda: (
            _unfilled(1, 8, 1, 64, dtype=HALF),
            _unfilled(1, 8, 8193, 64, dtype=HALF),
            _unfilled(1, 8, 8193, 64, dtype=HALF),
        ),
        None,
    ),
    ("view-rows", mixed, lambda: (_unfilled(3, 300000),), None),
    ("view-columns", mixed_columns, lambda: (_unfilled(1 << 16, 48),), None),
    ("view-back", mixed_back, lambda: (_unfilled(1 << 16, 48),), None),
    (
        "batch-norm",
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda: (_unfilled(16, 32, 56, 56),),
        None,
    ),
    ("layer-norm", lambda x: F.layer_norm(x, (1 << 18,)), lambda: (_unfilled(3, 1 << 18),), None),
    ("layer-norm-middle", lambda x: F.layer_norm(x, (32768,)), lambda: (_unfilled(64, 32768),), None),
    ("layer-norm-cache", lambda x: F.layer_norm(x, (1 << 19,)), lambda: (_unfilled(64, 1 << 19),), None),
    ("group-norm", lambda x: F.group_norm(x, 4), lambda: (_unfilled(2, 32, 128, 128),), None),
    ("rms-norm", lambda x: F.rms_norm(x, (1 << 18,)), lambda: (_unfilled(3, 1 << 18),), None),
    ("softmax", lambda x: x.softmax(-1), lambda: (_unfilled(4, 131072),), None),
    ("softmax-odd", lambda x: x.softmax(-1), lambda: (_unfilled(3, 200003),), None),
    ("softmax-dynamic", lambda x: x.softmax(-1), lambda: (_unfilled(4, 131072),), {"x": {1: "n"}}),
    ("log-softmax", lambda x: x.log_softmax(-1), lambda: (_unfilled(2, 128256),), None),
    ("softmax-columns", lambda x: x.softmax(0), lambda: (_unfilled(1 << 16, 8),), None),
    ("softmax-cache", lambda x: x.softmax(-1), lambda: (_unfilled(64, 1 << 19),), None),
    (
        "cross-entropy",
        lambda x, t: F.cross_entropy(x, t),
        lambda: (
            _unfilled(65, 128256),
            torch.zeros(65, dtype=torch.int64),
        ),
        None,
    ),
    (
        "cross-entropy-few",
        lambda x, t: F.cross_entropy(x.float(), t),
        lambda: (
            _unfilled(2, 128256, dtype=HALF),
            torch.zeros(2, dtype=torch.int64),
        ),
        None,
    ),
    (
        "entropy",
        lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
        lambda: (_unfilled(4, 128256),),
        None,
    ),
    ("cumsum", lambda x: x.cumsum(-1), lambda: (_unfilled(4, 1 << 17),), None),
    ("cumsum-sum", lambda x: x.cumsum(0).sum(), lambda: (_unfilled(1 << 18),), None),
    (
        "decode",
        decode,
        lambda: (
            _unfilled(1, 8, 1, 64),
            _unfilled(1, 8, 8192, 64),
            _unfilled(1, 8, 8192, 64),
        ),
        None,
    ),
    (
        "decode-half",
        decode,
        lambda: (
            _unfilled(1, 8, 4, 64, dtype=HALF),
            _unfilled(1, 8, 8192, 64, dtype=HALF),
            _unfilled(1, 8, 8192, 64, dtype=HALF),
        ),
        None,
    ),
    (
        "decode-received",
        decode_received,
        lambda: (
            _unfilled(1, 8, 1, 64),
            _unfilled(1, 8, 8192, 64),
            _unfilled(1, 8, 8192, 64),
        ),
        None,
    ),
    (
        "decode-lengths",
        lengths,
        lambda: (
            _unfilled(2, 8, 1, 64),
            _unfilled(2, 8, 8192, 64),
            _unfilled(2, 8, 8192, 64),
            torch.full((2,), 8192),
        ),
        None,
    ),
    (
        "attention-lengths",
        lengths,
        lambda: (
            _unfilled(2, 4, 2048, 64),
            _unfilled(2, 4, 2048, 64),
            _unfilled(2, 4, 2048, 64),
            torch.full((2,), 2048),
        ),
        None,
    ),
    (
        "attention-lengths-dynamic",
        lengths,
        lambda: (
            _unfilled(2, 4, 2048, 64),
            _unfilled(2, 4, 2048, 64),
            _unfilled(2, 4, 2048, 64),
            torch.full((2,), 2048),
        ),
        {"q": {2: "s"}, "k": {2: "t"}, "v": {2: "t"}},
    ),
    (
        "spread",
        lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1).log(),
        lambda: (_unfilled(129, 128256),),
        None,
    ),
    *(
        (
            f"{name}-{str(t)[6:]}",
            f,
            lambda t=t, n=n, r=r: tuple(_unfilled(1, 8, m, 64, dtype=t) for m in (r, n, n)),
            None,
        )
        for t in (HALF, torch.bfloat16, torch.float32)
        for name, f, r, n in (("leaving", leaving, 1, 8192), ("received", received, 4, 8193))
    ),
)
"""Each is compiled on tensors that nothing has filled: their numbers do not matter."""
