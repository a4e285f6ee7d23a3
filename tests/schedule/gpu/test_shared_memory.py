"""Shared memory of kernels without products: loops that hold the blocks of later steps there get as many stages as fit,
then smaller tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton import absent_gpu
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import build, print_triton
from torch import Tensor

from tilewright.ir.kernel import Scheduled
from tilewright.ir.schedule import Schedule
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.schedule.gpu import scheduler, shared_memory
from tilewright.schedule.gpu.shared_memory import shared_bytes
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, preset


def joined(x: Tensor, y: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the channels of one norm beside those of an activation of another, and its mask."""
    a, b, c, d, e, f = norms
    kept = ((x - a) * b + c)[:, : x.shape[1] // 2]
    made = F.leaky_relu((y - d) * e + f, 0.01)
    return torch.cat((kept, made), 1).contiguous(), made > 0


def summed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over all places of channels, and what reads them."""
    z = F.leaky_relu(x, 0.1) * y
    return z - z.mean((0, 2, 3), keepdim=True), (z * x).sum((0, 2, 3))


def images(channels: int, side: int) -> Tensor:
    return torch.randn(2, channels, side, side).to(memory_format=torch.channels_last)


def norms(channels: int, side: int = 16) -> list[Tensor]:
    per = [torch.randn(1, n, 1, 1) for n in (channels, channels // 2) for _ in range(3)]
    return [images(channels, side), images(channels // 2, side), *per]


def needed(made: Scheduled, machine: str, folder: Path) -> int:
    source = print_triton(made.program, (), preset(machine), variants(made.program)[0], "k0")
    return build(folder, source, machine).facts.shared


def stages(made: Scheduled) -> int:
    return made.program.stages


def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """From here on machines have so many bytes of shared memory."""
    most = 64 << 10
    resized = {MemoryKind.SHARED: most}
    monkeypatch.setattr(absent_gpu, "preset", lambda name: preset(name).resized(capacities=resized))
    return most


def unfitted(monkeypatch: pytest.MonkeyPatch, channels: int, machine: str) -> list[Scheduled]:
    """The kernels as they are where nobody counts."""
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "fit_shared_memory", lambda form, schedule, *_: schedule)
        return compiled(joined, norms(channels), machine=machine).kernels


@pytest.mark.parametrize("machine", ["sm_80", "sm_90"])
def test_blocks_of_later_steps_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str) -> None:
    most = little(monkeypatch)
    (greedy,) = unfitted(monkeypatch, 256, machine)
    assert needed(greedy, machine, tmp_path / "a") > most  # else this shows nothing
    (made,) = compiled(joined, norms(256), machine=machine).kernels
    assert needed(made, machine, tmp_path / "b") <= shared_bytes(made.program, preset(machine)) <= most
    assert stages(made) < stages(greedy)


@pytest.mark.parametrize(("machine", "channels"), [("sm_90", 32), ("gfx942", 256)])
def test_what_fits_stays(monkeypatch: pytest.MonkeyPatch, machine: str, channels: int) -> None:
    """Small blocks do, and those of machines whose loops copy nothing ahead."""
    greedy, made = (
        unfitted(monkeypatch, channels, machine),
        compiled(joined, norms(channels), machine=machine),
    )
    assert [k.schedule for k in greedy] == [k.schedule for k in made.kernels]
    assert any(stages(k) > 1 for k in greedy)


@pytest.mark.parametrize("machine", ["sm_90", "gfx942"])
@pytest.mark.parametrize("side", [4, 8, 16])
def test_the_estimate_is_from_above(tmp_path: Path, machine: str, side: int) -> None:
    made = compiled(summed, [images(512, side), images(512, side)], machine=machine).kernels
    for k, one in enumerate(made):
        needs = needed(one, machine, tmp_path / str(k))
        assert needs <= shared_bytes(one.program, preset(machine)) <= 2 * needs + (1 << 14)


@pytest.mark.parametrize("kib", [64, 12, 6])
def test_less_room_makes_smaller_tiles(tmp_path: Path, kib: int) -> None:
    """And the same results."""
    given = norms(256)
    made = compiled(joined, given)
    (whole,) = made.kernels
    target = preset("sm_90").resized(capacities={MemoryKind.SHARED: kib << 10})
    less = Solver(target, Options()).solve(whole.kernel, made.cover.layouts)
    assert needed(less, "sm_90", tmp_path) <= kib << 10
    (small, _), (large, _) = (made.run(given), replace(made, kernels=[less]).run(given))
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))
    assert isinstance(less.schedule, Schedule) and isinstance(whole.schedule, Schedule)
    assert (less.schedule.tiling.classes != whole.schedule.tiling.classes) == (kib < 64)


def test_a_kernel_that_needs_more_than_estimated_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little the estimate says."""
    right = shared_memory.shared_bytes
    monkeypatch.setattr(shared_memory, "shared_bytes", lambda program, target: right(program, target) // 8)
    most = little(monkeypatch)
    made = compiled(joined, norms(256))
    (found,) = made.kernels
    assert right(found.program, preset("sm_90")) > most
    shrunk = Solver(absent_gpu.preset("sm_90"), Options())
    assert shrunk.shrink_shared_memory(found.kernel, made.cover.layouts, 0.9)
    again = shrunk.solve(found.kernel, made.cover.layouts)
    assert right(again.program, preset("sm_90")) < right(found.program, preset("sm_90"))
    flat = compiled(lambda x: torch.tanh(x) + 1, [torch.randn(64, 512)])
    (alone,) = flat.kernels
    assert not shrunk.shrink_shared_memory(alone.kernel, flat.cover.layouts, 0.5)
