"""The programs that are compiled: the corpus of the lowering, attention cores, long reductions, steps of training, and
named models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.attention.workloads import WORKLOADS, Sizes
from torch import Tensor, nn

import tilewright
from tests.support.attention.cores import free
from tests.support.corpus import CASES, Case

from .long_reductions import LONG

Dims = Mapping[str, Mapping[int, str]] | None
MODELS = ("bert-base", "llama", "resnet-50", "convnext-t", "mobilenet-v2", "swin-t")
"""Those of the named models that need no file."""
HALVES = ("gemma2", "h2o", "corm")
"""Attention cores that are compiled in bf16 as well."""


@dataclass(frozen=True)
class Program:
    """What is compiled, by a function that does it."""

    name: str
    compiled: Callable[[], object]
    model: bool = False


def compiled(f: Callable[..., object], inputs: Callable[[], tuple[Tensor, ...]], dims: Dims = None) -> object:
    """A program for inference."""
    with torch.no_grad():
        return tilewright.compile(f, inputs(), dims=dims, options={"measure": False})


def trained(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> object:
    """Both passes of a module."""
    torch.manual_seed(0)
    net = make().train()
    f = torch.compile(net, backend=tilewright.backend, options={"measure": False})
    return f(torch.randn(shape)).sum().backward()


def _of_case(case: Case, dynamic: bool) -> Callable[[], object]:
    def f(*args: Tensor) -> Tensor | tuple[Tensor, ...]:
        return case.run(*args)

    names = [f"x{k}" for k in range(len(case.shapes))]
    dims = {n: d for n, d in zip(names, case.dynamic, strict=False) if d} if dynamic else None
    text = f"def g({', '.join(names)}):\n    return f({', '.join(names)})\n"
    space: dict[str, object] = {"f": f}
    exec(text, space)  # names of arguments are what dims go by
    return partial(compiled, space["g"], lambda: tuple(case.inputs()), dims)  # type: ignore[arg-type]


def _of_core(name: str, dtype: torch.dtype, loose: bool) -> Callable[[], object]:
    def inputs() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return Sizes(256, 4, 64, kv_heads=2).inputs(name, dtype=dtype, device="cpu")

    return partial(compiled, WORKLOADS[name]().eval(), inputs, free(name) if loose else None)


class Residual(nn.Module):
    """A block of a convolutional network with what gates its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1)
        self.norm, self.gate = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W] to the same."""
        y = self.second(F.gelu(self.norm(self.first(x))))
        return x + y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))


class Layer(nn.Module):
    """A layer of a transformer, attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, 64] to the same."""
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.into(self.norm(x)).chunk(3, -1))
        x = x + self.out(((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def _named(name: str) -> object:
    from benchmarks.named import ZOO

    work = ZOO[name].build()
    return compiled(work.target, lambda: tuple(work.inputs))  # type: ignore[arg-type]


def programs() -> Iterator[Program]:
    """All of them, models last."""
    for case in CASES:
        yield Program(f"case-{case.name}", _of_case(case, False))
        if case.dynamic:
            yield Program(f"case-{case.name}-dynamic", _of_case(case, True))
    for name in WORKLOADS:
        for dtype in (torch.float32, torch.bfloat16) if name in HALVES else (torch.float32,):
            for loose in (False, True):
                text = f"attention-{name}-{str(dtype)[6:]}{'-dynamic' if loose else ''}"
                yield Program(text, _of_core(name, dtype, loose))
    for name, f, inputs, dims in LONG:
        yield Program(f"long-{name}", partial(compiled, f, inputs, dims))
    yield Program("training-residual", partial(trained, Residual, (4, 8, 16, 16)))
    yield Program("training-layer", partial(trained, Layer, (2, 32, 64)))
    for name in MODELS:
        yield Program(f"model-{name}", partial(_named, name), model=True)
