"""Fixtures that every test shares: goldens, a cache of its own, fixed seeds, two threads."""

from __future__ import annotations

import difflib
import gc
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import lighter
from tests.long_tests import long_tests
from tilewright.pipeline.phases import check_phases
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.stats import STATS
from tilewright.schedule.cpu import cost
from tilewright.schedule.cpu.vectors import vector_lanes

# Torch makes every graph that it captures up as text for whoever listens to this logger, and pytest listens to all that
# do not propagate: a fifth of what capturing takes.
TRACE = logging.getLogger("torch.__trace")
TRACE.propagate = True
TRACE.handlers.clear()

lighter.lighten_torch()
lighter.lighten_disks()

GOLDENS = Path(__file__).parent / "golden"

WIDE_VECTOR_LANES = 16

MODULES = 40
"""After so many, what was set aside is looked at again."""

# Shared machines stall now and then: a deadline per example would only make tests flaky.
settings.register_profile(
    "tilewright", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tilewright")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden from this run")


def pytest_collection_finish() -> None:
    """What importing has made stays to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What leaves the process is collected as ever: libraries tell what they miss then."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {(file, name) for file, names in long_tests().items() for name in names}
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if (file, name.partition("[")[0]) in long:
            item.add_marker(pytest.mark.long)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Torch's thread count is a fact that plans may depend on; the suite fixes it."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def phases_verified() -> Iterator[None]:
    """After each phase the graph obeys the laws of graphs."""
    with check_phases(lambda name, state: state.graph.verify()):
        yield


@pytest.fixture(scope="session", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the processes of this run have built."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    lighter.share_libraries(folder)


@pytest.fixture(scope="session")
def modules() -> Iterator[int]:
    """The numbers of modules of tests, from 1."""
    return itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def set_aside(modules: Iterator[int]) -> None:
    """What earlier modules left alive (torch's graphs and ours, expressions) is millions of objects in the end, through
    all of which each collection goes that a measurement asks for: this takes seconds."""
    if next(modules) % MODULES == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Places for caches. Of `mktemp` each call lists all that there are."""
    parent, numbers = tmp_path_factory.mktemp("caches"), itertools.count()
    return (parent / str(n) for n in numbers)


@pytest.fixture(autouse=True)
def isolated(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No TILEWRIGHT_ variable of the caller, an empty kernel cache, no choice by the times of a busy machine, the same
    random numbers in every test, and counters that start at 0."""
    for name in [name for name in os.environ if name.startswith("TILEWRIGHT_")]:
        monkeypatch.delenv(name)
    cache = next(caches)
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(cache))
    monkeypatch.setenv("TILEWRIGHT_MEASURE", "0")
    monkeypatch.setenv(
        "TILEWRIGHT_VERIFY", "results"
    )  # whose memory the results of calls are: microseconds a call
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    STATS.reset()
    yield


@pytest.fixture
def unverified_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, which a test may change; and nobody looks at results between the steps of a plan or a loop, which
    what runs without Python does not show."""
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "false")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares with tests/golden/<name>.txt; `--update-goldens` writes it."""
    update = bool(request.config.getoption("--update-goldens"))

    def compare(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden {path.name}: run pytest --update-goldens and review it")
        kept = path.read_text(encoding="utf-8")
        if kept != text:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm="")
            pytest.fail(f"golden {name} differs:\n" + "\n".join(lines))

    return compare


@pytest.fixture(scope="module")
def costs_of_wide_vectors() -> Iterator[None]:
    """Kernels are priced as on vectors of 512 bits, whatever this machine has. With half as many lanes an exponential
    costs twice as much, and the model rather stores one than computes it again: a softmax may be two kernels."""
    rate = WIDE_VECTOR_LANES / vector_lanes(host_target())
    wide = replace(cost.CPU_COST, instructions_per_second=rate * cost.CPU_COST.instructions_per_second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "CPU_COST", wide)
        yield
