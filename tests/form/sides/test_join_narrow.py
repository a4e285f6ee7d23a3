"""Results whose nearest class is narrow are one line; what is read across it, or folded, stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.harness import interpret, same_as_interpreter
from torch import Tensor

from tilewright.ir.schedule import Schedule

GIVEN = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GIVEN)


def shuffled(x: Tensor) -> Tensor:
    return F.leaky_relu(F.pixel_shuffle(x, 2), 0.1)


def thirds(x: Tensor) -> Tensor:
    return F.pixel_shuffle(x, 3) + 1


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def channels_last(x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean).permute(0, 2, 3, 1).contiguous()


def pairs(x: Tensor) -> Tensor:
    return torch.stack([x * 2, x + 3], -1)


def masked(x: Tensor) -> Tensor:
    return x.tril() * 2


def transposed(x: Tensor) -> Tensor:
    """Neighbours of what is read are 1024 results apart."""
    return (
        (x.view(4, 16, 64, 64) * 2)
        .permute(0, 3, 1, 2)
        .reshape(4, 64, 4, 4, 64)
        .transpose(-1, -2)
        .contiguous()
    )


def steps(device: Device) -> list[str]:
    """What was done to the form of the one kernel."""
    (kernel,) = device.kernels
    assert isinstance(kernel.schedule, Schedule)
    return [step.name for step in kernel.schedule.form_steps]


@pytest.mark.parametrize("machine", ["sm_80", "gfx942"])
@pytest.mark.parametrize(
    ("f", "given", "dynamic"),
    [
        (shuffled, (rand(2, 16, 9, 20),), ()),
        (shuffled, (rand(2, 16, 9, 20),), ((0, 2),)),
        (thirds, (rand(2, 18, 5, 32),), ()),
        (scaled, (rand(700, 3), rand(3)), ()),
        (scaled, (rand(700, 3), rand(3)), ((0,), ())),
        (channels_last, (rand(2, 3, 20, 30), rand(1, 3, 1, 1)), ()),
        (pairs, (rand(30, 50),), ()),
        (masked, (rand(9, 40, 4),), ()),
    ],
)
def test_a_narrow_result_is_one_line(
    f: Callable[..., Tensor], given: Sequence[Tensor], dynamic: Sequence[Sequence[int]], machine: str
) -> None:
    device = compiled(f, given, dynamic, machine=machine)
    assert "join_narrow" in steps(device)
    (result,), _ = device.run(given)
    torch.testing.assert_close(result, f(*given))


def test_the_printed_kernel_makes_the_same(tmp_path: Path) -> None:
    jobs = [
        job
        for f, x in ((shuffled, rand(2, 16, 9, 20)), (thirds, rand(2, 18, 5, 32)))
        for job in compiled(f, (x,)).run((x,))[1]
    ]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome)


@pytest.mark.parametrize(
    ("f", "given"),
    [
        (transposed, (rand(4, 16, 64, 64),)),
        (lambda x: x.tril() * 2, (rand(9, 40, 40),)),
        (lambda x: x.sum(1) * 2, (rand(64, 64, 4),)),
        (lambda x: x.cumsum(0), (rand(64, 4),)),
    ],
)
def test_others_stay(f: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    assert "join_narrow" not in steps(compiled(f, given))
