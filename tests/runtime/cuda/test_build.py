"""Triton sources become machine code without a GPU: workers, the store, facts, refusals."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cuda.triton_sources import product, scaled

from tilewright.errors import BuildError, KernelRefused
from tilewright.lower.variants import Variant
from tilewright.runtime.cuda import triton_compat, workers
from tilewright.runtime.cuda.binary import resources
from tilewright.runtime.cuda.build import BuiltKernel, build_kernels, job_of
from tilewright.runtime.cuda.job import Job, KernelFacts
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore
from tilewright.target import preset

pytestmark = pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
HOPPER = preset("sm_90")


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "kernels")


def only(store: ContentStore, source: object, target: str = "sm_90") -> BuiltKernel:
    (built,) = build_kernels([source], preset(target), store)  # type: ignore[list-item]
    return built


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
def test_cubin(store: ContentStore, name: str) -> None:
    built = only(store, scaled(Variant(True, False)), name)
    assert built.code.startswith(b"\x7fELF") and f".target sm_{name[3:]}" in built.assembly
    assert built.facts.entry == "k0" and built.facts.threads == 128 and built.facts.hidden >= 0
    assert built.facts.registers in range(8, 64) and built.facts.spills == 0
    assert ".v4." in built.assembly


def test_hsaco(store: ContentStore) -> None:
    built = only(store, scaled(), "gfx942")
    assert built.code.startswith(b"\x7fELF") and "gfx942" in built.assembly
    assert built.facts.threads == 256 and built.facts.registers and built.facts.spills == 0


def test_facts_decide_the_width_of_accesses(store: ContentStore) -> None:
    aligned, generic, wide = build_kernels(
        [scaled(v) for v in (Variant(True, False), Variant(False, False), Variant(False, True))],
        HOPPER,
        store,
    )
    assert "ld.global.v4" in aligned.assembly and "ld.global.v" not in generic.assembly
    assert ".param .u32" in generic.assembly and ".param .u32" not in wide.assembly


def test_kernels_that_wait_are_known_by_their_code(store: ContentStore) -> None:
    plain, wait = scaled(Variant(True, False)), "    tl.extra.cuda.gdc_wait()\n"
    first, late = (plain.text.replace(at, f"{wait}{at}") for at in ("    i = tl.program", "    tl.store(b"))
    texts = [
        first.replace("    tl.store(b", "    tl.extra.cuda.gdc_launch_dependents()\n    tl.store(b"),
        late,
    ]
    built = build_kernels([plain, *(replace(plain, text=t) for t in texts)], HOPPER, store)
    assert [b.facts.early for b in built] == [False, True, False] and triton_compat.can_wait()
    assert KernelFacts.from_json(built[1].facts.to_json()) == built[1].facts
    order = [
        built[1].assembly.index(x)
        for x in ("griddepcontrol.wait", "ld.global", "griddepcontrol.launch", "st.gl")
    ]
    assert order == sorted(order)


def test_the_store_keeps_what_was_built(store: ContentStore) -> None:
    STATS.reset()
    first = build_kernels([scaled(), scaled(), product(64)], HOPPER, store)
    assert STATS.triton == 2 and STATS.cache_hits == 0 and first[0].folder == first[1].folder
    again = build_kernels([scaled(), product(64)], HOPPER, store)
    assert STATS.triton == 2 and STATS.cache_hits == 2
    assert [b.folder for b in again] == [first[0].folder, first[2].folder]
    for other in (replace(scaled(), warps=8), replace(scaled(), text=scaled().text + "# other\n")):
        assert only(store, other).folder != first[0].folder
    assert only(store, scaled(), "sm_80").folder != first[0].folder
    (first[0].folder / "kernel.bin").write_bytes(b"broken")
    assert only(store, scaled()).code.startswith(b"\x7fELF")


def test_what_a_version_with_other_facts_built_is_built_anew(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("tilewright.runtime.cuda.build._FACTS", "entry shared threads")
        before = only(store, scaled())
    STATS.reset()
    assert only(store, scaled()).folder != before.folder and STATS.triton == 1


def test_shared_memory_above_the_limit_is_refused(store: ContentStore) -> None:
    fits = only(store, product(128))
    assert 64 << 10 < fits.facts.shared <= 227 << 10
    with pytest.raises(BuildError, match=rf"needs {fits.facts.shared} bytes of shared memory, gfx0 has 1000"):
        levels = tuple(replace(x, capacity=1000) if x.name == "shared memory" else x for x in HOPPER.levels)
        build_kernels([product(128)], replace(HOPPER, name="gfx0", levels=levels), store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("undefined_name", "undefined_name is not defined"),
        ("tl.arange(0, 1000)", "power of 2"),
        ("(", "SyntaxError"),
    ],
)
def test_what_triton_says_is_in_the_error(store: ContentStore, change: str, words: str) -> None:
    bad = replace(scaled(), text=scaled().text + f"    {change}\n")
    with pytest.raises(BuildError, match=words):
        build_kernels([bad, scaled()], HOPPER, store)
    STATS.reset()
    assert only(store, scaled()) and STATS.triton == 0, "the good one was built beside the bad one"


def test_all_kernels_that_are_refused_are_named(store: ContentStore) -> None:
    bad = [replace(scaled(), text=scaled().text + f"    no_such_{n}\n") for n in range(2)]
    with pytest.raises(KernelRefused, match="no_such_0") as caught:
        build_kernels([bad[0], scaled(), bad[1], bad[0]], HOPPER, store)
    assert caught.value.kernels == (0, 2, 3)


def test_a_worker_that_dies_is_replaced(store: ContentStore) -> None:
    deadly = replace(scaled(), text="import os\nos._exit(3)\n" + scaled().text)
    with pytest.raises(BuildError, match="died"):
        only(store, deadly)
    assert only(store, scaled())


def test_what_kills_the_packing_pass_is_built_without(
    store: ContentStore, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (
        "import os",
        "from triton._C.libtriton import llvm",
        "llvm.optimize_module.__name__ == 'optimize_module' and os._exit(3)",
    )
    fragile = replace(scaled(), text="\n".join((*lines, scaled().text)))
    STATS.reset()
    built = only(store, fragile)
    assert built.facts.spills == 0 and STATS.triton == 1
    assert f"kernel {fragile.entry}, which is built again" in caplog.text
    assert only(store, fragile).folder == built.folder and STATS.cache_hits == 1


def test_a_kernel_that_a_pass_refuses_is_built_without(
    store: ContentStore, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (
        "from triton._C.libtriton import passes",
        "if passes.ttgpuir.add_optimize_thread_locality.__name__ != '<lambda>':",
        "    raise RuntimeError('PassManager::run failed')",
    )
    fragile = replace(scaled(), text="\n".join((*lines, scaled().text)))
    assert only(store, fragile).facts.spills == 0
    assert f"Triton failed over kernel {fragile.entry}, which is built again" in caplog.text


def test_a_worker_that_hangs_is_ended(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BUILD_LIMITS", replace(workers.BUILD_LIMITS, max_triton_seconds=0.2))
    with pytest.raises(BuildError, match="took over"):
        only(store, replace(scaled(), text="import time\ntime.sleep(60)\n" + scaled().text))


def test_a_kernel_that_is_only_timed_may_take_so_much_of_a_processor(store: ContentStore) -> None:
    """What waits is not what computes; what is refused for its time is built where it may take it."""
    waiting = replace(scaled(entry="k8"), text="import time\ntime.sleep(0.1)\n" + scaled(entry="k8").text)
    busy = replace(scaled(entry="k9"), text="while True:\n    pass\n" + scaled(entry="k9").text)
    build_kernels([scaled(entry="k7")], HOPPER, store)  # the workers have started, Triton is imported
    with pytest.raises(KernelRefused, match="of a processor") as refused:
        build_kernels([waiting, busy], HOPPER, store, processor_seconds=6.0)
    assert refused.value.kernels == (1,)
    done = replace(scaled(entry="k9"), text="for _ in range(10):\n    pass\n" + scaled(entry="k9").text)
    assert only(store, done).facts.spills == 0


@pytest.fixture
def own() -> Iterator[workers.Workers]:
    made = workers.Workers(1)
    yield made
    made.shutdown()


def process_of(own: workers.Workers) -> int:
    (worker,) = own._all  # pyright: ignore[reportPrivateUsage]
    return worker._process.pid  # pyright: ignore[reportPrivateUsage]


def built_by(own: workers.Workers, limit: float | None = None) -> int:
    """The process that built something."""
    (answer,) = own.submit([job_of(scaled(entry="k10"), HOPPER).to_json()], limit)
    assert "error" not in json.loads(answer.result())
    return process_of(own)


@pytest.fixture(params=[resource.RLIM_INFINITY, 100_000])
def allowed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seconds that processes started by this one may compute, but may let themselves compute longer."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (request.param, before[1]))
    yield request.param
    resource.setrlimit(resource.RLIMIT_CPU, before)


def test_a_worker_is_as_free_again_as_it_was(own: workers.Workers, allowed: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_CPU)
    for limit in (20.0, None, 200_000.0):
        lifted = limit is None or 0 < allowed < limit
        assert (resource.prlimit(built_by(own, limit), resource.RLIMIT_CPU) == before) == lifted


@pytest.mark.usefixtures("allowed")
def test_a_worker_that_has_used_up_half_of_its_time_is_not_asked_again(
    own: workers.Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a processor that a batch system allows a process is not for all kernels of a model: one over which it
    ends would be built with fewer passes, as if LLVM had failed over it."""
    first = built_by(own)
    assert built_by(own) == first
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_processor_seconds", lambda process: 60_000.0 * (process == first))
        limited = resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY
        assert (built_by(own) != first) == limited
    assert own.processes == 1


def test_a_worker_that_ends_by_a_signal_leaves_no_image_of_its_memory(own: workers.Workers) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if not before[1]:
        pytest.skip("no process may leave one here")
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert resource.prlimit(built_by(own), resource.RLIMIT_CORE)[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_settings_of_triton_do_not_reach_workers(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    own = workers.Workers(1)
    try:
        (answer,) = own.submit([job_of(scaled(entry="k7"), HOPPER).to_json()])
        assert "error" not in json.loads(answer.result()) and own.processes == 1
    finally:
        own.shutdown()
    assert own.processes == 0 and not own._folder.exists()


def test_a_process_ends_with_its_workers(tmp_path: Path) -> None:
    text = (
        "from tests.support.cuda.triton_sources import scaled\n"
        "from tilewright.runtime.cuda.build import *\nfrom tilewright.target import preset\n"
        "import sys\n"
        f"store = ContentStore(__import__('pathlib').Path({str(tmp_path / 'k')!r}))\n"
        "build_kernels([scaled()], preset('sm_90'), store)\n"
        "print(workers()._all[0]._process.pid, 'triton' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    pid, imported = done.stdout.split()
    assert imported == "False" and not Path(f"/proc/{pid}").exists()


def test_jobs_from_a_file(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.write_text(f"{job_of(scaled(), HOPPER).to_json()}\n\nnot json\n")
    command = [sys.executable, "-m", "tilewright._build", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    good, bad = map(json.loads, done.stdout.splitlines())
    assert set(good) == {"job", "code", "text", "facts"} and "not JSON" in bad["error"]


def test_jobs_and_facts_are_checked() -> None:
    job = job_of(scaled(), HOPPER)
    assert Job.from_json(job.to_json()) == job
    for text in ("[]", "{}", '{"text": 1}', json.dumps({**json.loads(job.to_json()), "entry": "a/b"})):
        with pytest.raises(BuildError):
            Job.from_json(text)
    with pytest.raises(BuildError):
        KernelFacts.from_json('{"shared": 1}')


def test_without_triton(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compat, "version", lambda: None)
    with pytest.raises(BuildError, match="not installed"):
        build_kernels([scaled()], HOPPER, store)


@pytest.mark.parametrize("junk", [b"", b"\x7fELF", b"\x7fELF" + bytes(80), bytes(range(256)) * 4])
def test_resources_of_junk(junk: bytes) -> None:
    assert resources(junk, "k0") == (None, None)


@pytest.mark.parametrize(
    ("order", "sizes", "mixed"),
    [("0, 1", "256x16x", True), ("1, 0", "256x16x", False), ("2, 0, 1", "4x8x16x", False)],
)
def test_sums_of_threads_that_would_mix_rows_are_told(order: str, sizes: str, mixed: bool) -> None:
    text = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 1, 1], order = [2, 0, 1]}>\n"
        f"#blocked1 = #ttg.blocked<{{sizePerThread = [1, 1], threadsPerWarp = [32, 1], order = [{order}]}}>\n"
        f"  %3 = tt.reshape %2 allow_reorder efficient_layout : tensor<{sizes}f32, #blocked1> -> tensor<4xf32, #b>"
    )
    assert triton_compat.mixes_rows(text) is mixed
    assert not triton_compat.mixes_rows(text.replace(" allow_reorder efficient_layout", ""))
