"""The benchmark of last arrivers as far as it goes without a GPU: what a tail computes, its code, what is launched."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.convolutions import Layer
from benchmarks.gemm import CUBLAS, Shape
from benchmarks.gpu_clock import Run, Tensors
from benchmarks.last_arriver import (
    EARLY,
    FULL,
    Bench,
    best,
    main,
    measured,
    options,
    ratios,
    summary,
    ways_of,
)
from benchmarks.last_arriver_tail import Merge, with_tail
from benchmarks.last_arriver_ways import LAST, LAST_SINGLE, ROWS, TWO, Problem, Proposer, Way, Ways
from benchmarks.record import Facts
from tests.support.cuda import fake_driver
from tests.support.cuda.launches import launches, number
from torch import Tensor

from benchmarks import gemm, last_arriver, last_arriver_ways
from tilewright.emit.triton.kernel import TritonSource
from tilewright.options import Options
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.driver import Device, Driver
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import Target, preset

library, fake = fake_driver.library, fake_driver.fake
"""Fixtures: a driver that only writes down what it is asked."""

LAYER, PRODUCT, VECTOR = Layer("small", 64, 64, 7, 3, 1, 1), Shape(16, 256, 64), Shape(1, 256, 64)

DRIVER_VERSION = 13000
"""One that launches early."""

INTERPRETER = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
given = torch.load(sys.argv[2])
found = []
for _ in range(2):
    given["result"].fill_(torch.nan)
    arguments = [given[name] for name in given["order"]]
    kernel.k0[(given["blocks"],)](*arguments)
    found.append((given["result"].clone(), given["counters"].clone()))
torch.save(found, sys.argv[2])
"""
"""Runs a kernel twice: what its result and counters then hold."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel takes a second to build."""
    monkeypatch.setattr(last_arriver_ways, "KEPT", 1)
    monkeypatch.setattr(last_arriver_ways, "KEPT_COUNTS", 1)
    monkeypatch.setattr(last_arriver_ways, "MOST_PARTS", 4)


def plain_machine() -> Target:
    """Without descriptors, which the interpreter cannot take from here."""
    return replace(preset("sm_90"), descriptors=False)


def last_of(found: Ways) -> str:
    """The one way whose last block merges in fp64."""
    (name,) = (name for name, way in found.ways.items() if way.kind == LAST)
    return name


def interpreted(
    source: TritonSource, tensors: Mapping[str, Tensor | int], order: list[str], folder: Path
) -> Path:
    """The file with what two runs of a kernel left."""
    text = "".join(line for line in source.text.splitlines(True) if "gdc_" not in line)
    (folder / "kernel.py").write_text(text)
    (folder / "run.py").write_text(INTERPRETER)
    torch.save({**tensors, "order": order}, folder / "memory.pt")
    command = [sys.executable, "run.py", "kernel.py", "memory.pt"]
    subprocess.run(command, cwd=folder, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return folder / "memory.pt"


@pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
@pytest.mark.parametrize("of", [LAYER, PRODUCT, VECTOR], ids=["convolution", "product", "vector"])
def test_the_last_block_merges_parts_and_resets_its_counter(of: Layer | Shape, tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = Problem(of)
    found = Proposer(problem, plain_machine()).all()
    way = found.ways[last_of(found)]
    ((name, places),) = way.steps
    inputs = problem.inputs(torch.device("cpu"))
    names = [f"operand{k}" for k in range(len(inputs) - 1)] + ["result", "partials", "counters"]
    memory = {
        **dict(zip(names, inputs, strict=False)),
        "partials": torch.full((way.partials,), torch.nan), "error": torch.zeros(1),
        "counters": torch.zeros(way.tiles, dtype=torch.int32), "blocks": way.blocks,
    }  # fmt: skip
    order = [*(names[p] for p in places), "error"]
    (first, once), (second, twice) = torch.load(
        interpreted(found.kernels.sources[name], memory, order, tmp_path)
    )
    operands = [t.float() for t in inputs[:-1]]
    right = of.convolved(*operands) if isinstance(of, Layer) else operands[0] @ operands[1].t()
    assert (first.float() - right).abs().max() <= right.abs().max() / 1000
    assert torch.equal(first, second) and not once.any() and not twice.any() and len(once) == way.tiles


def test_what_has_no_tail() -> None:
    found = Proposer(Problem(PRODUCT), preset("sm_90")).all()
    source = next(s for name, s in found.kernels.sources.items() if name in ("s2p0", "s4p0"))
    merge = Merge(2, 16 * 64, 8, bias=False)
    assert "atomic_add" in with_tail(source, merge).text
    with pytest.raises(ValueError, match="parts are not found"):
        with_tail(source, replace(merge, elements=77))
    with pytest.raises(ValueError, match="does not end in a store"):
        with_tail(replace(source, text=source.text.rstrip() + "\n    tl.debug_barrier()\n"), merge)
    with pytest.raises(ValueError, match="no function"):
        with_tail(replace(source, text=source.text.replace("def k0", "def other")), merge)


def count_arguments(found: Ways, folder: Path) -> None:
    """The fake driver reads from the code how many arguments a kernel has: each descriptor is one, and tells its
    extents and strides."""
    for k, (name, built) in enumerate(found.kernels.built.items()):
        arguments = found.kernels.sources[name].arguments
        shown = sum(2 * len(a.descriptor.extents) for a in arguments if a.descriptor is not None)
        place = folder / f"kernel{k}"
        place.mkdir()
        (place / "kernel.bin").write_bytes(str(len(arguments) + shown + built.facts.hidden).encode() + b"\0")
        found.kernels.built[name] = replace(built, folder=place)


@pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
def test_machine_code_and_launches(
    library: Path, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counts release and acquire, parts are read past the first cache, and edges are as they are asked for."""
    number(fake, "driver_version").value = DRIVER_VERSION
    options = Options()
    store = ContentStore(default_root(options))
    gpu = Device(Driver(store, options, str(library)), 1)
    monkeypatch.setattr(gemm, "driver_device", lambda *given: gpu)
    monkeypatch.setattr(last_arriver, "gpu_target", lambda *given: preset("sm_90"))
    problem = Problem(LAYER)
    found = Proposer(problem, preset("sm_90")).all()
    name = last_of(found)
    two = name.replace(LAST, TWO)
    wanted = [k for n in (two, name) for k, _ in found.ways[n].steps]
    found.kernels.sources = {n: s for n, s in found.kernels.sources.items() if n in wanted}
    found.build(preset("sm_90"), store, float("inf"))
    assert set(found.built) == {two, name}
    made = found.kernels.built[name]
    assert "atom.global.gpu.acq_rel.add" in made.assembly and "ld.global.cg.v4" in made.assembly
    assert made.facts.early and not made.facts.spills
    count_arguments(found, tmp_path)
    bench = Bench.of(found, store, torch.device("cpu"))
    sets = [problem.inputs(torch.device("cpu")) for _ in range(2)]
    for edges in (FULL, EARLY):
        bench.run(found.ways[two], edges, sets)()
        bench.run(found.ways[name], edges, sets)()
    image, weight, bias, out = (t.data_ptr() for t in sets[1])
    partials, counters = bench.partials.data_ptr(), bench.counters.data_ptr()
    ran = launches(fake)
    # A merge moves little and releases first: behind the last one of a run others may launch theirs.
    assert [x.early for x in ran] == [0] * 6 + [0, 1, 1, 0] + [0, 1]
    assert set(ran[2].values[:3]) == {image, weight, partials}
    assert set(ran[3].values[:3]) == {partials, bias, out}
    assert list(ran[5].values[:6]) == [image, weight, partials, out, counters, bias]


class OnTheHost(Bench):
    """Products by torch; the counters of one way stay."""

    def run(self, way: Way, edges: str, sets: Sequence[Tensors]) -> Run:
        """One after the other."""

        def act() -> int:
            if way.kind == TWO and edges == EARLY:
                raise RuntimeError("a launch failed")
            for x, weight, out in sets:
                torch.mm(x, weight.t(), out=out)
            self.counters[0] = int(way.kind == LAST_SINGLE)
            return 0

        return act


def test_a_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_arriver, "capture", lambda run: run)
    monkeypatch.setattr(
        Bench, "of", lambda *given: OnTheHost({}, {}, torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    )
    monkeypatch.setattr(Ways, "built", property(lambda found: found.ways))
    problem = Problem(PRODUCT)
    found = Proposer(problem, preset("sm_90")).all()
    given = argparse.Namespace(device="cpu", rounds=2)
    facts = measured(problem, found, ContentStore(default_root(Options())), given)
    name = last_of(found)
    told = ways_of(facts)
    assert told[name]["early_right"] and best(facts, LAST, EARLY) is not None
    assert told[name.replace(LAST, LAST_SINGLE)]["full_right"] is False
    assert told[name.replace(LAST, TWO)]["early_failed"] == "a launch failed"
    assert f"not right: row {name.replace(LAST, TWO)} early" in summary({"row": facts})


def test_rows() -> None:
    assert list(ROWS)[:4] == ["C7", "C8", "C11", "R9"] and "16x11008x4096" in ROWS and len(ROWS) == 10
    with pytest.raises(SystemExit):
        options(["--only", "C12"])
    assert main(["--device", "cuda"]) == 2 or torch.cuda.is_available()


def test_nothing_is_built_when_time_is_up() -> None:
    found = Proposer(Problem(PRODUCT), preset("sm_90")).all()
    found.build(preset("sm_90"), ContentStore(default_root(Options())), 0.0)
    assert not found.built and set(found.missing) == set(found.kernels.sources)


def test_the_summary_takes_the_best_right_way() -> None:
    def way(kind: str, us: float, right: bool = True) -> Facts:
        return {"kind": kind, "full_us": us, "full_right": right}

    ways = {
        "s4p0 two": way(TWO, 6.0), "s4p0 last": way(LAST, 5.0), "s8p0 two": way(TWO, 8.0),
        "s8p0 last": way(LAST, 4.0, right=False),
    }  # fmt: skip
    rows: dict[str, Facts] = {"1x2x3": {f"{CUBLAS}_us": 7.0, "ways": ways}, "C7": {"failed": "late"}}
    assert best(rows["1x2x3"], LAST, FULL) == ("s4p0 last", 5.0) and best(rows["1x2x3"], LAST, EARLY) is None
    bests, pairs = ratios(rows, LAST, FULL)
    assert bests == [1.2] and pairs == pytest.approx([(1.2 * 2.0) ** 0.5])
    told = summary(rows)
    assert "1.200" in told and "late" in told and "not right: 1x2x3 s8p0 last full" in told
    json.dumps(rows)
