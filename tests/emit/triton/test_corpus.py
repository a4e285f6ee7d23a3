"""The corpus as Triton: the interpreter agrees with torch, and the kernels build for machines that are not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.corpus import CASES, Case, layer_norm, rms
from tests.support.triton.corpus import BY_NAME, Entry, entries, entry
from tests.support.triton.harness import Built, build, interpret, print_triton
from torch import Tensor

from tilewright.ir.program import Branch
from tilewright.ir.schedule import Role, Schedule
from tilewright.lower.variants import Variant, variants
from tilewright.target import MemoryKind, preset

QUICK = ("chain", "softmax", "layer_norm", "column_max_and_sum", "row_argmax", "any_all", "cumsum_columns", "concat",
         "embedding", "cross_entropy", "max_pool", "pixel_shuffle", "causal_attention", "scalar_output")  # fmt: skip
"""One of each family; the rest is slow."""
FAMILIES = ("softmax", "row_argmax", "cumsum_columns", "embedding")


@pytest.fixture(scope="module")
def quick() -> list[Entry]:
    """Kernels of `QUICK` for sizes not known before; those of `FAMILIES` also for known ones."""
    static = [n for n in QUICK if n in FAMILIES or not BY_NAME[n].dynamic]
    return [
        *(entry(BY_NAME[n], False) for n in static),
        *(entry(BY_NAME[n], True) for n in QUICK if BY_NAME[n].dynamic),
    ]


def agree(chosen: list[Entry], folder: Path, scale: int = 1) -> None:
    """Run kernels in the interpreter and compare with torch."""
    jobs = [e.job(scale) for e in chosen]
    for e, job, outcome in zip(chosen, jobs, interpret(folder, jobs), strict=True):
        e.compare(job, outcome, scale)


def test_the_interpreter_agrees_with_torch(quick: list[Entry], tmp_path: Path) -> None:
    agree(quick, tmp_path)


@pytest.mark.slow
def test_the_interpreter_agrees_with_torch_on_all(tmp_path: Path) -> None:
    every = entries()
    assert len(every) > 80
    agree(every, tmp_path)


WIDE = (
    "embedding",
    "pixel_shuffle",
    "chain",
    "layer_norm",
    "cumsum_columns",
    "concat",
    "max_pool",
    "causal_attention",
)


def test_wide_indices_give_the_same(quick: list[Entry], tmp_path: Path) -> None:
    chosen = [e for e in quick if e.case.name in WIDE]
    assert len({e.case.name for e in chosen}) == len(WIDE)
    jobs = [e.job(variant=Variant(False, True)) for e in chosen]
    for e, job, outcome in zip(chosen, jobs, interpret(tmp_path, jobs), strict=True):
        e.compare(job, outcome)


def made(e: Entry, folder: Path, machine: str = "sm_90", variant: Variant | None = None) -> Built:
    """Build the most special variant of a kernel."""
    program = e.scheduled.program
    source = print_triton(program, e.symbols, preset(machine), variant or variants(program)[0], "k0")
    return build(folder / f"{e.case.name}{bool(e.symbols)}{machine}", source, machine)


def fits(e: Entry, built: Built, machine: str, slow_path: bool = False) -> None:
    """Little shared memory, and registers enough but on a `slow_path` (addresses of 64 bits, or not aligned: schedules
    are made for the others)."""
    level = preset(machine).level(MemoryKind.SHARED)
    assert level is not None and built.facts.shared <= level.capacity, e.case.name
    assert built.facts.hidden in (0, 2), "the launcher adds at most two empty pointers"
    spills = 0 if slow_path else built.facts.spills or 0
    assert spills <= SPILLS, f"{e.case.name} spills {spills} bytes"


SPILLS = 64
"""Bytes that a thread may put aside. The assembler does so for few bytes although it has registers left, to have more
threads at a time; blocks of 1024 threads have but 64 registers each."""


def test_kernels_build(quick: list[Entry], tmp_path: Path) -> None:
    for e in quick:
        fits(e, made(e, tmp_path), "sm_90")


@pytest.mark.slow
def test_all_kernels_build(tmp_path: Path) -> None:
    for e in entries([c.name for c in CASES if c.name not in QUICK]):
        for variant in variants(e.scheduled.program):
            slow_path = variant.wide or not variant.aligned
            fits(e, made(e, tmp_path / str(variant), variant=variant), "sm_90", slow_path)


@pytest.mark.parametrize("machine", ["sm_80", "sm_100", "gfx942"])
def test_families_build_elsewhere(tmp_path: Path, machine: str) -> None:
    for name in FAMILIES:
        e = entry(BY_NAME[name], False, machine)
        fits(e, made(e, tmp_path, machine), machine)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["sm_80", "sm_100", "gfx942"])
def test_more_kernels_build_elsewhere(tmp_path: Path, machine: str) -> None:
    for name in QUICK:
        for dynamic in {False, bool(BY_NAME[name].dynamic)}:
            e = entry(BY_NAME[name], dynamic, machine)
            fits(e, made(e, tmp_path, machine), machine)


# --- what one thread takes from memory at once ------------------------------------


@dataclass(frozen=True)
class Half(Case):
    """A case whose numbers are halves."""

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [t.half() if t.is_floating_point() else t for t in super().inputs(scale, seed)]


def gelu_bias(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


ROWS = {0: "n", 1: "m"}
LARGE: dict[str, Case] = {
    "softmax": Case("softmax", lambda x: torch.softmax(x, -1), ((512, 4096),), (ROWS,)),
    "rms_norm": Case("rms_norm", rms, ((512, 4096), (4096,)), (ROWS, {0: "m"})),
    "layer_norm": Case("layer_norm", layer_norm, ((512, 1024), (1024,), (1024,)), ({0: "n"},)),
    "chain": Case("chain", lambda x, y: torch.tanh(x * y + 1).relu() - x.abs(), ((1 << 20,),) * 2, ({0: "n"},) * 2),
    "gelu_bias": Case("gelu_bias", gelu_bias, ((1024, 4096), (4096,)), ({0: "n"},)),
    "transpose": Case("transpose", lambda x: x.T.contiguous() * 2, ((2048, 1024),), (ROWS,)),
    "column_sum": Case("column_sum", lambda x: x.sum(0), ((4096, 4096),), (ROWS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "column_sum", "chain"])
def test_wide_indices_cost_nothing(name: str, tmp_path: Path) -> None:
    """Where a block begins is a number of 64 bits, within it 32 bits are enough: as many instructions, as wide."""
    e = entry(replace(LARGE[name], dynamic=()), False)
    narrow, wide = (made(e, tmp_path / str(w), variant=Variant(True, w)) for w in (False, True))
    assert wide.accesses == narrow.accesses
    count, least = (b.text.count(";\n") for b in (wide, narrow))
    assert count <= 1.1 * least + 12, (count, least)


def schedule_of(e: Entry) -> Schedule:
    assert isinstance(e.scheduled.schedule, Schedule)
    return e.scheduled.schedule


@pytest.mark.parametrize(
    "kind, name",
    [(Half, name) for name in LARGE]
    + [pytest.param(Case, name, marks=[] if name == "transpose" else [pytest.mark.slow]) for name in LARGE],
)
def test_accesses_are_as_wide_as_they_can_be(kind: Callable[..., Case], name: str, tmp_path: Path) -> None:
    case = LARGE[name]
    if kind is Half:
        case = Half(**{f: getattr(case, f) for f in ("name", "run", "shapes", "dynamic", "high")})
    for dynamic in (False, True):
        e = entry(case, dynamic)
        built = made(e, tmp_path)
        assert built.facts.spills in (None, 0)
        widths = built.accesses
        if (
            kind is Half
            and any(c.role is Role.STREAMED for c in schedule_of(e).tiling.classes)
            and name != "column_sum"
        ):
            # Rows that are longer than any that have blocks of their own: measured, more threads are worth more.
            assert set(widths) == {64} and dynamic
            continue
        assert widths[128] >= 2 or (widths[128] and name == "column_sum"), widths
        tails = any(isinstance(s, Branch) for s in e.scheduled.program.statements())
        assert not [w for w in widths if w < (16 if name == "column_sum" or tails else 128)], (
            f"{widths}, dynamic {dynamic}"
        )


def test_without_the_facts_accesses_are_narrow(tmp_path: Path) -> None:
    e = entry(LARGE["softmax"], True)
    assert made(e, tmp_path).accesses.keys() == {128}
    assert 128 not in made(e, tmp_path / "generic", variant=Variant(False, True)).accesses
