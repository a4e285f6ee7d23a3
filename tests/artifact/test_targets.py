"""Artifacts for machines that are not here: GPU kernels as they are launched again, other CPUs, what is refused."""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.artifacts import put_together, taken_apart
from tests.support.cuda.fake_driver import STREAM, fake, gpu, library
from tests.support.cuda.launches import N, launches, printed
from torch import Tensor, nn

import tilewright
from tilewright.artifact import machine, targets
from tilewright.artifact.file import container
from tilewright.artifact.text.gpu_kernels import read_gpu_unit, write_gpu_unit
from tilewright.errors import ArtifactError, InputError, UnsupportedError
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, integer
from tilewright.ir.program import Buffer, GridAxis, TileProgram
from tilewright.ir.sizes.dims import ceildiv
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.cuda.job import KernelFacts
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler
from tilewright.runtime.stats import STATS
from tilewright.target import preset

__all__ = ["fake", "gpu", "library"]
needs_triton = pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")


def _program() -> TileProgram:
    blocks = ceildiv(N, integer(1024))
    return TileProgram((Buffer("a", f32, N), Buffer("b", f32, N)), (GridAxis(Axis("g", blocks), blocks),), ())


def _build(sources: Any) -> list[BuiltKernel]:
    """Images for the fake driver: how many arguments they take."""
    return [
        BuiltKernel(Path(s.entry), KernelFacts(s.entry, 100, 128, 2, 1, 0, "3.6"),
                    str(len(s.arguments) + 2).encode() + b"\0")
        for s in sources
    ]  # fmt: skip


def _kept(change: Callable[[Any], None] | None = None) -> container.Container:
    """A file with a unit of one kernel."""
    parts = container.Parts()
    unit = CudaUnit((_program(),), ("m", "n"), VariantCompiler(printed, _build), None)
    parts.text("g0.unit", write_gpu_unit(unit, parts, "g0.unit"))
    path = Path("kept.tw")
    container.write(path, {}, parts, lambda head: container.NO_SEAL)
    if change is not None:
        taken = taken_apart(path.read_bytes())
        told = taken.text("g0.unit")
        change(told)
        taken.change_text("g0.unit", told)
        path.write_bytes(put_together(taken))
    return container.read(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_kernels_are_launched_as_before_without_triton(gpu: Device, fake: ctypes.CDLL) -> None:
    """All variants are there: aligned and not, narrow and wide."""
    unit = read_gpu_unit(_kept(), "g0.unit", gpu)
    for n, base in ((1600, 0x1000), (1600, 0x1004), (1 << 31, 0x1000), ((1 << 31) + 1, 0x1000)):
        run = unit.prepare([(0, [(0, 0), (1, 0)])], array("Q", [base, 0x4000]), array("q", [0, n]))
        assert run() == 0
    seen = launches(fake)
    assert [x.function for x in seen] == [b"k0a", b"k0", b"k0aw", b"k0w"]
    assert list(seen[0].grid) == [2, 1, 1] and list(seen[0].block) == [128, 1, 1]
    assert seen[0].shared == 100 and seen[0].stream == STREAM + 1
    assert list(seen[0].values)[:4] == [0x1000, 0x4000, 1600, gpu.error_address]


def _first(told: Any) -> Any:
    return told["unit"]["variants"]["tuple"][0]


def _lacks_one(told: Any) -> None:
    told["unit"]["variants"]["tuple"].pop()


def _of_no_parameter(told: Any) -> None:
    _first(told)["arguments"]["tuple"][0]["index"] = 7


def _other_entry(told: Any) -> None:
    _first(told)["facts"]["entry"] = "another"


def _no_threads(told: Any) -> None:
    _first(told)["facts"]["threads"] = 0


def _no_section(told: Any) -> None:
    _first(told)["code"] = "g0.unit.code.99"


def _bucket_of_nothing(told: Any) -> None:
    told["unit"]["buckets"] = {"tuple": [{"tuple": [3, {"tuple": []}]}]}


def _other_class(told: Any) -> None:
    _first(told)["variant"] = {"is": "Box", "type": 1, "swizzle": 1, "shape": {"tuple": []}}


@pytest.mark.parametrize(
    "change",
    [
        _lacks_one, _of_no_parameter, _other_entry, _no_threads, _no_section, _bucket_of_nothing, _other_class,
        lambda told: told.update(more=1),
    ],
)  # fmt: skip
def test_kernels_that_do_not_fit_together_are_refused(change: Callable[[Any], None], gpu: Device) -> None:
    with pytest.raises(ArtifactError):
        read_gpu_unit(_kept(change), "g0.unit", gpu)


class Rows(nn.Module):
    """A kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 2 + 1)


def _saved(module: nn.Module, *args: Tensor, targets: tuple[str, ...]) -> Path:
    compiled = tilewright.compile(module.eval(), args)
    tilewright.save(compiled, "x.tw", targets=targets)
    return Path("x.tw")


@needs_triton
def test_one_file_for_a_gpu_and_this_machine() -> None:
    """The GPU is not here: its code is made all the same, and the other runs."""
    path = _saved(Rows(), torch.randn(64), targets=("sm_90", targets.host_target().name))
    file = container.read(path)
    assert file.text("g0.plan.sm_90")["plan"]["device"] == "cuda:0"  # type: ignore[index,call-overload]
    assert any(name.startswith("g0.unit.code.") for name in file.named(container.SectionKind.BINARY))
    STATS.reset()
    loaded: Any = tilewright.load(path, rebuild=False)
    assert STATS.graphs == STATS.triton == 0
    x = torch.randn(64)
    assert torch.equal(loaded(x), torch.relu(x * 2 + 1))
    with pytest.raises(ArtifactError, match="code for sm_90, here no such GPU"):
        tilewright.load(path, rebuild=False, device="cuda")
    with pytest.raises(InputError, match="no code for xpu"):
        tilewright.load(path, device="xpu")


@needs_triton
def test_kernels_wait_where_options_and_machine_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are launched early again: it is known of their code."""
    monkeypatch.setenv("TILEWRIGHT_EARLY_LAUNCH", "any")
    file = container.read(_saved(Rows(), torch.randn(64), targets=("sm_80", "sm_90")))
    for suffix, early in (("", False), (".sm_90", True)):  # the first one has no suffix
        told = json.dumps(file.text(f"g0.unit{suffix}"))
        assert told.count(f'"early": {str(early).lower()}') == told.count('"early": ') > 0


@needs_triton
@pytest.mark.parametrize(
    ("here", "runs"), [((9, 0), True), ((9, 1), True), ((8, 9), False), ((10, 0), False)]
)
def test_gpu_code_runs_on_its_own_generation(
    here: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: here)
    differs = machine.differences(machine.versions(), machine.facts_of(preset("sm_90")))
    assert bool(differs) is not runs
    assert runs or f"code for sm_90, here sm_{here[0]}{here[1]}" in differs


def test_code_for_a_narrower_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine.runs("x86-64-v3", targets.host_target().name):
        pytest.skip("this machine runs no such code")
    path = _saved(nn.Sequential(nn.Linear(8, 8), Rows()), torch.randn(4, 8), targets=("x86-64-v3",))
    loaded: Any = tilewright.load(path, rebuild=False)
    assert "for x86-64-v3" in loaded.way.origin and loaded(torch.randn(4, 8)).shape == (4, 8)


def test_what_is_no_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no target 'sm_12'.*sm_80"):
        _saved(Rows(), torch.randn(4), targets=("sm_12",))
    monkeypatch.setattr(targets, "host_target", lambda: preset("x86-64"))
    with pytest.raises(UnsupportedError, match="code for x86-64-v4 cannot be made on x86-64"):
        targets.targets_named(["x86-64-v4"], preset("x86-64"))


@needs_triton
def test_what_only_a_cpu_calls_is_named() -> None:
    """Torch's attention of the CPU is another op than those of GPUs."""

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    compiled = tilewright.compile(
        Attention(), (torch.randn(1, 2, 8, 16),), options={"contractions": "library"}
    )
    with pytest.raises(UnsupportedError, match="flash_attention_for_cpu.*which sm_80 does not have"):
        tilewright.save(compiled, "x.tw", targets=("sm_80",))


@needs_triton
def test_devices_that_a_program_names_are_those_of_the_target() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sort(x + torch.arange(4, device=x.device)).values

    path = _saved(Counts(), torch.randn(3, 4), targets=("sm_80",))
    told = json.dumps(container.read(path).text("g0.plan.sm_80"))
    assert '"cpu"' not in told and "cuda:0" in told
