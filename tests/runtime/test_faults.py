"""What a machine does to a process: kills, many at once, signals, forks, missing memory, foreign settings."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import BuildError, CacheWarning
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.options import Options
from tilewright.plan import CallStep
from tilewright.runtime.cpu import toolchain
from tilewright.runtime.cuda import workers
from tilewright.runtime.plan import steps
from tilewright.runtime.store import cache
from tilewright.runtime.store.cache import ContentStore, digest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes")

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
NOTE = digest("a decision")


def compiler_that(folder: Path, work: str) -> str:
    """A program that claims to be a compiler; its last arguments are `-o unit.so -lm -pthread`."""
    path = folder / "fake++"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo fake;; *) {work};; esac\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def child(work: Callable[[], object]) -> int:
    """The wait status of a forked process that does `work` and leaves at once."""
    pid = os.fork()
    if not pid:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", CacheWarning)
                work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the parent sees the status, people see the text
            os.write(2, repr(error).encode()[:500])
            os._exit(1)
    return os.waitpid(pid, 0)[1]


# --- kill -9 at every step of building and writing down --------------------------------------


class Deadly:
    """Kills the process at point number `when`: before or after an operation on files, or in the middle of a write."""

    def __init__(self, root: Path, when: int, counter: Path | None = None) -> None:
        self.root, self.when, self.seen, self.counter = str(root), when, 0, counter

    def point(self) -> None:
        self.seen += 1
        if self.seen == self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        for name in ("replace", "rename", "mkdir", "open", "fsync", "unlink", "rmdir", "utime"):
            setattr(os, name, self._around(getattr(os, name)))
        write = cache._write_file

        def halves(path: Path, data: bytes) -> None:
            if self.seen + 1 == self.when:
                with open(path, "wb") as file:
                    file.write(data[: len(data) // 2])
            self.point()
            write(path, data)
            self.point()

        cache._write_file = halves

    def _around(self, real: Callable[..., object]) -> Callable[..., object]:
        def watched(*args: object, **kwargs: object) -> object:
            if args and isinstance(args[0], (str, os.PathLike)) and not str(args[0]).startswith(self.root):
                return real(*args, **kwargs)
            self.point()
            made = real(*args, **kwargs)
            self.point()
            return made

        return watched


def children() -> set[str]:
    """The processes that this one started and has not waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def work_of(root: Path, compiler: str, turn: int) -> Callable[[], Path]:
    """One compilation as far as files are concerned: a library is built, and two notes are written."""

    def work() -> Path:
        store = ContentStore(root)
        path = toolchain.build_texts([f"{ANSWER} // {turn}"], (), store, Options(compiler=compiler))
        for note in (NOTE, digest(f"{turn}")):
            if store.get(note) is None:
                store.put(note, {"note.json": b"{}" * 500, "other": note.encode()})
        return path

    return work


def check_complete(root: Path) -> None:
    """Every entry that can be had is what was written, and none stands half in its place."""
    store = ContentStore(root)
    for folder in root.glob("[0-9a-f][0-9a-f]/*"):
        assert store.get(folder.name) == folder, "a rename is all or nothing"
        files = {p.name: p.read_bytes() for p in folder.iterdir()}
        if "unit.so" in files:
            assert files["unit.so"] == b"whole\n" * 1000
        else:
            assert files["note.json"] == b"{}" * 500 and files["other"] == folder.name.encode()


@pytest.mark.parametrize("points", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_at_every_point(tmp_path: Path, points: int) -> None:
    root = tmp_path / "kernels"
    compiler = compiler_that(tmp_path, 'yes whole 2>/dev/null | head -1000 > "unit.so"')
    toolchain.find_compiler(Options(compiler=compiler))
    store = ContentStore(root)
    killed, turn, when = 0, 0, 0
    while killed < points:
        when += 1 if points > 100 else 3
        deadly = Deadly(tmp_path, when)
        work = work_of(root, compiler, turn)

        def run(deadly: Deadly = deadly, work: Callable[[], Path] = work) -> None:
            deadly.arm()
            work()

        status = child(run)
        assert os.WIFSIGNALED(status) or status == 0, "it dies, or it works"
        check_complete(root)
        with store.single_flight(digest(f"{turn}"), timeout=1.0):
            pass
        if status == 0:  # no point is left: another library, from the first point on
            assert work().read_bytes() == b"whole\n" * 1000
            turn, when = turn + 1, 0
            assert killed, "points were met"
        else:
            killed += 1
    assert work_of(root, compiler, turn)().read_bytes() == b"whole\n" * 1000


# --- many at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_one_build_for_many_processes(tmp_path: Path, processes: int) -> None:
    log = tmp_path / "log"
    compiler = compiler_that(tmp_path, f"echo run >> {log}; sleep 0.5; echo whole > unit.so")
    toolchain.find_compiler(Options(compiler=compiler))
    root = tmp_path / "kernels"
    children: list[int] = []
    for _ in range(processes):
        pid = os.fork()
        if not pid:
            path = toolchain.build_texts([ANSWER], (), ContentStore(root), Options(compiler=compiler))
            os._exit(0 if path.read_bytes() == b"whole\n" else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * processes
    assert 1 <= len(log.read_text().split()) <= 2


def test_threads_call_while_others_compile() -> None:
    x = torch.randn(64, 64)
    made = tilewright.compile(lambda x: torch.softmax(x * 2, -1) + 1, (x,))
    wanted = torch.softmax(x * 2, -1) + 1
    faults: list[object] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.wait(0.05):
            try:
                torch.testing.assert_close(made(x), wanted)
            except BaseException as error:  # noqa: BLE001 - a thread's failure is the test's
                faults.append(error)
                return

    def compile_one(k: int) -> None:
        try:
            fast = tilewright.compile(lambda x: torch.relu(x - k) * k, (x,))
            torch.testing.assert_close(fast(x), torch.relu(x - k) * k)
        except BaseException as error:  # noqa: BLE001
            faults.append(error)

    callers = [threading.Thread(target=call) for _ in range(32)]
    compilers = [threading.Thread(target=compile_one, args=(k,)) for k in range(1, 9)]
    for t in (*callers, *compilers):
        t.start()
    for t in compilers:
        t.join()
    stop.set()
    for t in callers:
        t.join()
    assert not faults


# --- caches that go ----------------------------------------------------------------------------


def test_an_entry_that_vanishes_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process empties the cache between the check of an entry and its use."""
    store = ContentStore(tmp_path / "kernels")
    real = toolchain.load
    emptied: list[Path] = []

    def load(path: Path) -> ctypes.CDLL:
        if not emptied:
            emptied.append(path)
            path.unlink()
        return real(path)

    monkeypatch.setattr(toolchain, "load", load)
    assert toolchain.built([ANSWER], (), store, Options()).answer() == 42
    assert emptied


def test_a_model_whose_library_vanishes_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.pipeline.backends import cpu
    from tilewright.runtime.cpu import kernels

    real = kernels.load
    emptied: list[Path] = []

    def load(path: Path) -> ctypes.CDLL:
        if not emptied and path.name == toolchain.LIBRARY:
            emptied.append(path)
            path.unlink()
        return real(path)

    assert cpu.NativeUnit is kernels.NativeUnit
    x = torch.randn(33)
    tilewright.compile(lambda x: torch.exp(x) - 1, (x,))  # pool and launcher are loaded before
    monkeypatch.setattr(kernels, "load", load)
    fast = tilewright.compile(lambda x: torch.exp(x) * 3, (x,))
    assert emptied and fast.coverage.generated == 2
    torch.testing.assert_close(fast(x), torch.exp(x) * 3)


# --- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"garbage\n", b'{"code": ""}\n', b'{"job": "of another"}\n', b"\xff\xfe\x00\n", b"[]\n"]
)
def test_a_worker_that_prints_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    program = tmp_path / "worker"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stdin.readline()\nsys.stdout.buffer.write({said!r})\n"
    )
    program.chmod(0o700)
    real = subprocess.Popen

    def start(command: list[str], **rest: object) -> subprocess.Popen[str]:
        return real([str(program)], **rest)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    own = workers.Workers(1)
    try:
        with pytest.raises(BuildError, match="no answer to its job"):
            own.submit(["{}"])[0].result()
        assert own.processes == 0
    finally:
        own.shutdown()


# --- signals -----------------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts arrive, also in a process that was started to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_compiling_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = compiler_that(tmp_path, "exec sleep 60")
    store = ContentStore(tmp_path / "kernels")
    before = children()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        toolchain.build_texts([ANSWER, ANSWER], (), store, Options(compiler=compiler))
    assert time.monotonic() - start < 30, "the compiler is ended, not waited for"
    assert children() <= before
    assert toolchain.load(toolchain.build_texts([ANSWER], (), store, Options())).answer() == 42


def test_a_program_that_ignores_its_children(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        path = toolchain.build_texts([ANSWER], (), ContentStore(tmp_path / "kernels"), Options())
        assert toolchain.load(path).answer() == 42
        with pytest.raises(BuildError):
            toolchain.build_texts(["nonsense"], (), ContentStore(tmp_path / "kernels"), Options())
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_a_call_leaves_the_model_usable() -> None:
    x = torch.randn(256, 256)
    fast = tilewright.compile(lambda x: torch.softmax(x @ x, -1), (x,))
    wanted = torch.softmax(x @ x, -1)
    for delay in (0.01, 0.02, 0.05):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            end = time.monotonic() + 30
            while time.monotonic() < end:
                fast(x)
        torch.testing.assert_close(fast(x), wanted)
        assert torch.get_num_threads() == 2


# --- fork, memory, settings --------------------------------------------------------------------


def test_a_fork_after_use(tmp_path: Path) -> None:
    x = torch.randn(64, 65)
    made = tilewright.compile(lambda x: torch.softmax(x, -1) * 2, (x,))
    made(x)
    wanted = torch.softmax(x, -1) * 2

    def use() -> None:
        torch.set_num_threads(1)  # what every forked child of torch must do
        torch.testing.assert_close(made(x), wanted)
        fast = tilewright.compile(lambda x: torch.relu(x) * 3, (x,))
        torch.testing.assert_close(fast(x), torch.relu(x) * 3)

    assert child(use) == 0
    torch.testing.assert_close(made(x), wanted)


def test_memory_that_ends_in_the_middle_of_a_plan() -> None:
    """The next call is right, inputs that would have been written to are as they were, and nothing is kept."""
    lacking = [True]

    @torch.library.custom_op("faults::sometimes", mutates_args=())
    def sometimes(x: Tensor) -> Tensor:
        if lacking[0]:
            raise MemoryError("no memory")
        return x + 1

    @sometimes.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def program(x: Tensor, state: Tensor) -> Tensor:
        y = torch.exp(x)
        state.mul_(2)
        return torch.softmax(torch.ops.faults.sometimes(y), -1) + state

    x, state = torch.randn(8, 16), torch.ones(8, 16)
    fast = torch.compile(program, backend="tilewright")
    for _ in range(3):
        with pytest.raises(MemoryError):
            fast(x, state)
        assert torch.equal(state, torch.ones(8, 16))
    lacking[0] = False
    torch.testing.assert_close(fast(x, state), torch.softmax(torch.exp(x) + 1, -1) + 2)
    assert torch.equal(state, 2 * torch.ones(8, 16)) and torch.get_num_threads() == 2


SETTINGS = """
#include <fenv.h>
#if defined(__SSE__)
#include <xmmintrin.h>
static unsigned word() { return _mm_getcsr() & ~0x3fu; }
#else
static unsigned word() { return 0; }
#endif
extern "C" __attribute__((visibility("default"))) long settings() { return long(word()) << 16 | fegetround(); }
extern "C" __attribute__((visibility("default"))) int upward(int on) {
  return fesetround(on ? FE_UPWARD : FE_TONEAREST);
}
"""


def test_settings_of_the_process_are_left_alone(tmp_path: Path) -> None:
    """Rounding, denormals, locale, umask, handlers of signals, thread counts: as before, whatever they are."""
    import locale

    probe = toolchain.load(toolchain.build_texts([SETTINGS], (), ContentStore(None), Options()))
    probe.settings.restype = ctypes.c_long

    def found() -> tuple[object, ...]:
        mask = os.umask(0)
        os.umask(mask)
        handlers = tuple(
            signal.getsignal(s) for s in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE)
        )
        counts = torch.get_num_threads(), torch.get_num_interop_threads()
        return probe.settings(), locale.setlocale(locale.LC_ALL), mask, handlers, counts, os.getcwd()

    x = torch.randn(64, 64)
    mask = os.umask(0o027)
    flushes = torch.set_flush_denormal(True)
    probe.upward(1)
    try:
        before = found()
        fast = tilewright.compile(lambda x: torch.softmax(x @ x, -1) / 1.5, (x,))
        fast(x)
        assert found() == before
    finally:
        probe.upward(0)
        torch.set_flush_denormal(False)
        os.umask(mask)
    assert flushes in (True, False)
    torch.testing.assert_close(fast(x), torch.softmax(x @ x, -1) / 1.5)


def test_a_locale_with_decimal_commas(tmp_path: Path) -> None:
    """Numbers in generated text are the program's, not the user's."""
    import locale

    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "pt_BR.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            continue
    else:
        pytest.skip("no such locale is installed")
    try:
        x = torch.randn(8, 8)
        torch.testing.assert_close(tilewright.compile(lambda x: x * 1.5 + 0.25, (x,))(x), x * 1.5 + 0.25)
    finally:
        locale.setlocale(locale.LC_ALL, before)


def test_a_call_that_fails_names_itself() -> None:
    def fails(x: Tensor) -> Tensor:
        raise MemoryError("no memory")

    act = steps.calling(CallStep(LibraryCall("library.op", fails, (Operand(0),)), (0,), (1,)), {})
    with pytest.raises(MemoryError) as caught:
        act([torch.ones(1), None])
    assert caught.value.__notes__ == ["in the call library.op"]
