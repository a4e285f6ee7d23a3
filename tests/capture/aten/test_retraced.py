"""An exported program without writes is traced once, to what torch's own way makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import tilewright
from tilewright.capture import exported as capture
from tilewright.capture.aten.retraced import retraced
from tilewright.capture.exported import exported
from tilewright.capture.fx import from_fx


class Module(nn.Module):
    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Tensor) -> object:
        return self.run(*args)


class Residual(nn.Module):
    """A convolution, a norm and a linear layer; its inputs have the names of an op and of a function of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, linear: Tensor, input: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.norm(self.conv(linear))) * input.to(torch.float64).float()
        x = nn.functional.dropout(nn.functional.interpolate(x, scale_factor=2.0), training=self.training)
        return {"y": self.out(x.mean((2, 3))), "again": linear, "window": x[:, :, 1:]}


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = k.shape[1] - q.shape[1]
    far = torch.arange(q.shape[1])[:, None] + length - torch.arange(k.shape[1])
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=far >= 0) + torch.zeros(
        q.shape[0], 1, 1
    )


def export(module: nn.Module, *given: Tensor, dims: object = None) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.eval(), given, dynamic_shapes=dims, strict=False)  # pyright: ignore[reportArgumentType]


def read(program: ExportedProgram) -> tuple[object, ...]:
    """All that the compiler gets of a program, but for torch's numbers of nodes."""
    made = exported(program)
    graph = from_fx(made.gm, frozen=made.weights, ranges=made.ranges)
    held = [(name, t.data_ptr()) for name, t in made.weights.items()]
    return (
        re.sub(r"node='\w+'", "", str(graph)),
        held,
        made.inputs,
        made.conditions,
        made.ranges,
        made.out_spec,
        dict(made.names),
    )


BATCH, QUERIES, KEYS = Dim("batch", min=1, max=64), Dim("queries", min=2), Dim("keys", min=2)
PLAIN: Mapping[str, Callable[[], ExportedProgram]] = {
    "linear": lambda: export(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(3, 8)),
    "encoder": lambda: export(encoder(), torch.randn(2, 6, 16)),
    "residual": lambda: export(Residual(), torch.randn(2, 3, 8, 8), torch.randn(8, 1, 1)),
    "expanded": lambda: export(Module(torch.sin), torch.randn(1, 4).expand(3, 4)),
    "free sizes": lambda: export(
        Module(attention), torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8),
        dims=(({0: BATCH, 1: QUERIES}, {0: BATCH, 1: KEYS}, {0: BATCH, 1: KEYS}),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_one_trace_makes_what_torch_makes_with_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PLAIN[name]()
    with monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", None)  # not called
        at_once = read(program)
    monkeypatch.setattr(capture, "retraced", lambda program: None)
    assert at_once == read(program)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def writes(x: Tensor) -> Tensor:
    return x.clone().add_(1)


def counts(x: Tensor) -> Tensor:
    return x[x > 0].sum()


@pytest.mark.parametrize("module", [Counts(), Module(branches), Module(writes), Module(counts)])
def test_torchs_own_way_is_gone_for_writes_bodies_and_sizes_of_data(module: nn.Module) -> None:
    x = torch.randn(5)
    program = export(module, x)
    assert retraced(program) is None
    ready = tilewright.compile(program)
    if isinstance(module, Counts):
        for calls in (1, 2):
            torch.testing.assert_close(ready(x), calls * x)
    else:
        for given in (x, x.abs(), -x.abs()):
            torch.testing.assert_close(ready(given), module(given))
