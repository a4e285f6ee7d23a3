"""Which sources are built of a cover for a GPU, without building them; which kernel of a library is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.support.one_kernel import capture
from tests.support.triton.corpus import BY_NAME
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import SizeHints
from tilewright.emit.source import Source
from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import KernelRefused
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.pipeline import build as building
from tilewright.pipeline.backends import cpu, cuda
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver
from tilewright.target import preset


@pytest.mark.parametrize(
    ("name", "dynamic", "length", "timed", "usual"),
    [("softmax", True, 200, 1, 11), ("softmax", True, 208, 1, 11), ("softmax", False, 200, 1, 1)],
)
def test_a_trial_builds_what_it_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, dynamic: bool, length: int, timed: int, usual: int
) -> None:
    made: list[TritonSource] = []

    def build(sources: Sequence[TritonSource], **_: object) -> list[BuiltKernel]:
        made.extend(sources)
        return [cast(BuiltKernel, None)] * len(sources)

    monkeypatch.setattr(cuda, "build_kernels", build)
    monkeypatch.setattr(cuda, "driver_device", lambda *_: cast(Device, None))
    graph = capture(BY_NAME[name], dynamic)
    symbols = graph.symbols()
    hints = SizeHints(dict(zip(map(str, symbols), (33, length), strict=False)))
    solver = Solver(preset("sm_90"), Options(), hints=hints)
    builder = building.KernelBuilder(building.in_silence, cuda.CudaBackend(), solver, cast(Decisions, None))
    cover = partition(graph, solver.price, hints)
    for exact, wanted in (True, timed), (False, usual):
        made.clear()
        kernels = builder.built([cover], symbols, only_timed=exact)
        assert len(made) == wanted and kernels.unit is not None
    (aligned,) = {bool(s.divisible) for s in made[:1]} if not dynamic else {length % 16 == 0}
    made.clear()
    builder.built([cover], symbols, only_timed=True)
    assert bool(made[0].divisible) == aligned


def test_sizes_that_nobody_has_seen_are_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those are that data decide: no example tells them."""
    monkeypatch.setattr(cuda, "build_kernels", lambda sources, **_: [cast(BuiltKernel, None)] * len(sources))
    monkeypatch.setattr(cuda, "driver_device", lambda *_: cast(Device, None))
    graph = capture(BY_NAME["softmax"], True)
    solver = Solver(preset("sm_90"), Options())
    builder = building.KernelBuilder(building.in_silence, cuda.CudaBackend(), solver, cast(Decisions, None))
    built = builder.built([partition(graph, solver.price, solver.hints)], graph.symbols())
    assert built.unit is not None and built.programs > 0


def several(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torch.tanh(x).sum(-1), torch.exp(y), (z * 2).sum(0), torch.sin(z).sum(), x.mean(0)


def every_other(n: int) -> Tensor:
    return torch.randn(2 * n)[::2]


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def _group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 2, w, b)


def _batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True)


def _resampled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def _images_and_weights() -> tuple[Tensor, ...]:
    return channels_last(3, 4, 5, 6), every_other(4), every_other(4)


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "group norm": (_group_norm, lambda: (torch.randn(16, 10), every_other(10), every_other(10))),
    "group norm of images": (_group_norm, _images_and_weights),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (10,), w, b),
        lambda: (torch.randn(10, 7).mT, every_other(10), every_other(10)),
    ),
    "batch norm": (_batch_norm, _images_and_weights),
    "softmax": (lambda x: x.softmax(1), lambda: (channels_last(3, 4, 5, 6),)),
    "cumsum": (lambda x: x.cumsum(1), lambda: (torch.randn(6, 9).mT,)),
    "average pool": (lambda x: F.avg_pool2d(x, 2), lambda: (channels_last(3, 4, 6, 6),)),
    "maximum pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: (channels_last(3, 8, 6, 6)[:, ::2],)),
    "resampled": (_resampled, lambda: (channels_last(1, 4, 3, 3),)),
    "gathered": (
        lambda x, i: x.gather(1, i),
        lambda: (torch.randn(5, 4).mT, torch.randint(0, 5, (6, 4)).mT),
    ),
    "embedding": (
        lambda w, i: F.embedding(i, w),
        lambda: (torch.randn(4, 9).mT, torch.randint(0, 9, (3, 5)).mT),
    ),
}


@pytest.fixture
def broken_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a hyperbolic tangent do not compile."""
    printed = cpu.emit_units

    def broken(*given: Any) -> Sequence[Source]:
        return [
            replace(s, text=s.text.replace("\nextern", "\nno_such_type unknown;\nextern", 1))
            if "tanh" in s.text else s for s in printed(*given)
        ]  # fmt: skip

    monkeypatch.setattr(cpu, "emit_units", broken)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("broken_tanh")
def test_calls_in_place_of_a_refused_kernel_take_operands_as_the_program_lays_them(name: str) -> None:
    """Torch's own kernels read some operands as if they were rows: a group norm its weights."""
    call, draw = CALLS[name]

    def run(y: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        made = call(*operands)
        return torch.exp(y).sum(0), made.tanh(), made.flatten() @ torch.ones(made.numel(), 3)

    torch.manual_seed(0)
    given = torch.randn(50, 3), *draw()
    tilewright.reset()
    ours = torch.compile(run, backend="tilewright")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"library calls.*no_such_type"):
        torch.testing.assert_close(ours(*given), run(*given), rtol=1e-5, atol=1e-5)
    (made,) = tilewright.compilations()
    assert "a refused kernel" in [c.reason for c in made.calls]


def test_single_numbers_are_shifted_by_constants() -> None:
    """Beside a norm a shift is one of numbers, not of registers; the constant is an int there."""

    def run(x: Tensor, i: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        norm = F.group_norm(x, 2, w, w)
        return torch.take_along_dim(x, i.remainder(10), -1), i << 1, i >> 1, norm @ norm.mT

    given = torch.randn(16, 10), torch.randint(0, 5, (1, 2)), torch.randn(10)
    tilewright.reset()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(run, backend="tilewright")(*given), run(*given), rtol=1e-4, atol=1e-4
        )
    (made,) = tilewright.compilations()
    assert "a refused kernel" not in [c.reason for c in made.calls]


@pytest.mark.usefixtures("broken_tanh")
def test_a_kernel_that_does_not_compile_costs_that_kernel() -> None:
    given = torch.randn(7, 9), torch.randn(5), torch.randn(6, 11)
    tilewright.reset()
    run = torch.compile(several, backend="tilewright")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"tanh.*library calls.*no_such_type"):
        torch.testing.assert_close(run(*given), several(*given))
    (made,) = tilewright.compilations()
    assert [c.reason for c in made.calls if "tanh" in c.name] == ["a refused kernel"]
    assert made.coverage.generated >= 5


def test_a_compiler_that_refuses_all_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise KernelRefused("it is broken")

    monkeypatch.setattr(cpu, "build", refuse)
    monkeypatch.setattr(cpu, "build_texts", refuse)
    tilewright.reset()
    run = torch.compile(several, backend="tilewright", options={"cache": False})
    given = torch.randn(7, 9), torch.randn(5), torch.randn(6, 11)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="runs as captured"):
        torch.testing.assert_close(run(*given), several(*given))
