"""Programs captured on a GPU that need not be here: tensors are described, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


class Nowhere:
    """A device that loads nothing."""

    ordinal = 0


def traced(function: Callable[..., object], *shapes: tuple[int, ...], host: int = -1,
           dtype: torch.dtype = torch.float32) -> fx.GraphModule:  # fmt: skip
    """The graph of a function of tensors of these shapes, of which number `host` lies on the CPU."""
    with FakeTensorMode():
        places = ["cpu" if k == host else "cuda" for k in range(len(shapes))]
        given = [torch.empty(s, device=d, dtype=dtype) for s, d in zip(shapes, places, strict=True)]
    return make_fx(lambda *a: _listed(function(*a)), tracing_mode="fake")(*given)


def _listed(results: object) -> list[object]:
    return list(results) if isinstance(results, tuple) else [results]
