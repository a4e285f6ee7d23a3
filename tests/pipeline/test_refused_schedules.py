"""What becomes of a kernel whose schedule does not build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.specialised import CHANGES, attention

from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import KernelRefused
from tilewright.options import Options
from tilewright.pipeline.backends import BACKENDS, cuda
from tilewright.pipeline.build import KernelBuilder, RefusedKernels, in_silence
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.job import KernelFacts
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver
from tilewright.target import Target, preset

pytestmark = pytest.mark.filterwarnings("ignore:a schedule that was measured before is not taken")
FACTS = KernelFacts("k0", 0, 128, 0, None, None, "3.6.0")


@dataclass
class Compiler:
    """Refuses as many texts in Gluon, and in Triton, as it is told."""

    refuses: dict[str, int]
    asked: list[str] = field(default_factory=list[str])

    def build(
        self, sources: Sequence[TritonSource], target: Target, store: ContentStore, **_: object
    ) -> list[BuiltKernel]:
        (dialect,) = {s.dialect for s in sources if s.variant.aligned}
        self.asked.append(dialect)
        if self.refuses.get(dialect, 0):
            self.refuses[dialect] -= 1
            raise KernelRefused("it does not build", tuple(range(len(sources))))
        return [BuiltKernel(Path(), FACTS, b"") for _ in sources]


@pytest.fixture(scope="module")
def device() -> Device:
    return compiled(attention(CHANGES["full"]), [torch.zeros(1, 64, 512, 64).half()] * 3)


def built(device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, prefer: bool = True) -> Solver:
    monkeypatch.setattr(cuda, "build_kernels", compiler.build)
    options = Options(contractions="inside")
    solver = Solver(preset("sm_90"), options)
    decisions = Decisions(solver.target, ContentStore(None), options, {})
    builder = KernelBuilder(in_silence, BACKENDS["cuda"], solver, decisions, None)
    (kernel,) = (k.kernel for k in device.kernels)
    if prefer:
        solver.prefer(kernel, solver.specialised(kernel, device.cover.layouts)[0])
    builder.built([device.cover], ())
    return solver


def test_a_preferred_schedule_is_forgotten(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler({"gluon": 1})
    solver = built(device, compiler, monkeypatch)
    assert compiler.asked == ["gluon", "triton"] and not solver.preferred and not solver.shrunk


def test_then_the_usual_one_has_its_own_tries(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler({"gluon": 1, "triton": 1})
    solver = built(device, compiler, monkeypatch)
    assert compiler.asked == ["gluon", "triton", "triton"] and len(solver.shrunk) == 1


def test_tries_come_to_an_end(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler({"triton": 9})
    with pytest.raises(RefusedKernels, match="does not build"):
        built(device, compiler, monkeypatch, prefer=False)
    assert compiler.asked == ["triton", "triton"]


def test_what_is_preferred_later_counts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that once got less shared memory may still be found faster in another way."""
    solver = built(device, Compiler({"triton": 1}), monkeypatch, prefer=False)
    (kernel,) = (k.kernel for k in device.kernels)
    layouts = device.cover.layouts
    assert len(solver.shrunk) == 1 and not solver.solve(kernel, layouts).schedule.memory.warp_specialised
    solver.prefer(kernel, solver.specialised(kernel, layouts)[0])
    assert solver.solve(kernel, layouts).schedule.memory.warp_specialised
