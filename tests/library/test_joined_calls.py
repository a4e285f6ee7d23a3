"""A depthwise convolution with the products around it is one call, unless what lies between is read elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.plan.data import CallStep, Plan
from tilewright.runtime.own import form
from tilewright.runtime.own.form import FusedProduct, NativeMethod
from tilewright.tuning.runtime_thresholds import OWN_KERNELS


class Bottleneck(nn.Module):
    """A block that widens, looks around and narrows, with what `reads` says besides; the image is padded unevenly."""

    def __init__(self, stride: int, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.expand = nn.Sequential(nn.Conv2d(16, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6())
        self.pad = nn.ZeroPad2d((0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1))
        self.depthwise = nn.Sequential(
            nn.Conv2d(48, 48, 3, stride, groups=48, bias=False), nn.BatchNorm2d(48), nn.ReLU6()
        )
        self.project = nn.Conv2d(48, 16, 1)
        self.head = nn.Conv2d(16, 32, 3, padding=1)  # columns that fill vectors of any machine

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        wide = self.expand(x)
        seen = self.depthwise(self.pad(wide))
        y = self.project(seen)
        if self.reads == "sum":
            y = self.head(y + x)
        return (y, wide) if self.reads == "expanded" else (y, seen) if self.reads == "depthwise" else (y,)


@pytest.fixture(autouse=True)
def images_of_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(form, "OWN_KERNELS", replace(OWN_KERNELS, min_between_ratio=0.0))
    yield


def compiled(model: nn.Module, x: Tensor, **options: bool) -> tilewright.CompiledModel:
    with torch.no_grad():
        return tilewright.compile(model, (x,), freeze=True, options={"measure": False, **options})


def products_of(found: tilewright.CompiledModel) -> list[FusedProduct]:
    plan = found.trace["plan"]  # type: ignore[index]
    assert isinstance(plan, Plan)
    calls = [s.call.function for g in plan.segments for s in g.steps if isinstance(s, CallStep)]
    return [f for f in calls if isinstance(f, FusedProduct)]


def check(model: nn.Module, x: Tensor, found: tilewright.CompiledModel) -> None:
    with torch.no_grad():
        for _ in range(3):  # from the second run on by one native call
            torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("reads", ["", "sum", "expanded", "depthwise"])
def test_what_nothing_else_reads_lies_inside_a_call(stride: int, reads: str) -> None:
    if stride == 2 and reads == "sum":
        return
    model, x = Bottleneck(stride, reads).eval(), torch.randn(2, 3, 19, 22)
    found = compiled(model, x, verify=True)
    check(model, x, found)
    chains = [p for p in products_of(found) if p.way is NativeMethod.DEPTHWISE_CHAIN]
    assert len(chains) == 1 and chains[0].is_whole and chains[0].added == (reads == "sum")
    assert (chains[0].first is None) == (reads == "expanded")
    assert (chains[0].then is None) == (reads == "depthwise")
    told = str(found.coverage)
    assert f"aten.convolution x{5 if reads == 'sum' else 4}" in told and "in routines of our own" in told, (
        told
    )


def test_sizes_that_are_not_known_stay_apart() -> None:
    model, x = Bottleneck(1).eval(), torch.randn(2, 3, 19, 22)
    with torch.no_grad():
        found = tilewright.compile(
            model, (x,), dims={"x": {2: "rows"}}, freeze=True, options={"measure": False}
        )
    assert all(p.first is p.then is None for p in products_of(found))
    for rows in (19, 7):
        check(model, torch.randn(2, 3, rows, 22), found)


def test_a_chain_that_fails_is_done_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Bottleneck(1, "sum").eval(), torch.randn(1, 3, 12, 9)
    found = compiled(model, x)

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory for an image")

    monkeypatch.setattr(FusedProduct, "place", refuse)
    with pytest.warns(RuntimeWarning, match="no memory for an image"):
        check(model, x, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, x, found)


def test_chains_are_kept_in_files(tmp_path: Path) -> None:
    for stride, reads in ((1, "sum"), (2, ""), (2, "expanded"), (1, "depthwise")):
        model, x = Bottleneck(stride, reads).eval(), torch.randn(1, 3, 17, 16)
        found = compiled(model, x)
        with torch.no_grad():
            found.prepare((x,), {})
            want = found(x)
        tilewright.save(found, tmp_path / "chain.tw")
        loaded = tilewright.load(tmp_path / "chain.tw", rebuild=False)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), want, rtol=0, atol=0)
