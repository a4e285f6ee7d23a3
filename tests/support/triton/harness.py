"""Runs printed kernels in Triton's interpreter, many in one child, and builds them for GPUs that are not here."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.emit.triton.kernel import Argument, TritonSource, emit_triton
from tilewright.interp.algebra import STORAGE
from tilewright.interp.program import run_program
from tilewright.ir.dtype import DType, bool_
from tilewright.ir.program import Buffer, TileProgram
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import Variant
from tilewright.runtime.cuda.job import Job as BuildJob
from tilewright.runtime.cuda.job import KernelFacts
from tilewright.runtime.cuda.triton_compat import compile_job
from tilewright.target import Target, preset

GUARD = 128
"""Elements before and after every buffer that nobody may touch."""
STAYING = 2
"""Blocks that are launched of a kernel whose blocks go through grid points."""
NARROW = Variant(aligned=False, wide=False)


@dataclass(frozen=True)
class Job:
    """One run of a program: `inputs` are the contents of its parameters (None: an output); of a list, of its rows one
    after the other."""

    program: TileProgram
    inputs: Sequence[np.ndarray | None]
    sizes: dict[str, int]
    symbols: tuple[str, ...] = ()
    variant: Variant = NARROW
    name: str = ""

    @property
    def rows(self) -> int:
        """How often the program runs."""
        return len(self.inputs) // len(self.program.params)

    def source(self) -> TritonSource:
        """The printed kernel."""
        self.program.verify()
        return print_triton(
            self.program, self.symbols or tuple(self.sizes), preset("sm_90"), self.variant, "k0"
        )


@dataclass(frozen=True)
class Outcome:
    """The parameters after a run, and the error word."""

    arrays: list[np.ndarray]
    error: int


def _poison(dtype: DType, output: bool) -> np.ndarray:
    """One element of a guard zone: what must not be read among inputs, a known pattern around outputs."""
    storage = STORAGE[dtype.name]
    if dtype.is_float and not output:
        return np.array(np.nan).astype(storage)
    return np.frombuffer(b"\x5a" * storage.itemsize, storage)[0] if dtype is not bool_ else np.array(True)


def _tensor(a: Argument, sizes: dict[str, int]) -> tuple[int, int, list[int], list[int], list[int]]:
    """A descriptor for exact sizes: its parameter, its start, extents, strides and block."""
    d = a.descriptor
    assert d is not None
    extents, strides = ([dims.evaluate(e, sizes) for e in some] for some in (d.extents, d.strides))
    return a.index, dims.evaluate(d.start, sizes), extents, strides, list(d.tile)


def _untouched(buffer: Buffer, sizes: dict[str, int]) -> np.ndarray:
    """An output before a run."""
    return np.full(dims.evaluate(buffer.size, sizes), _poison(buffer.dtype, True), STORAGE[buffer.dtype.name])


def _disk(array: np.ndarray) -> np.ndarray:
    kind = {"bool": np.uint8, "bfloat16": np.int16}.get(str(array.dtype))
    return array if kind is None else array.view(kind)


_CHILD: list[subprocess.Popen[str]] = []


def _child() -> subprocess.Popen[str]:
    """The process with the interpreter, which takes seconds to start: one for all tests that this process runs."""
    if not _CHILD:
        _CHILD.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("child.py"))], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
    return _CHILD[0]


@atexit.register
def _end() -> None:
    """End the child, if there is one."""
    while _CHILD:
        child = _CHILD.pop()
        child.kill()
        child.communicate()


def _ask(folder: Path) -> str:
    """Have the jobs of a folder run; what went wrong."""
    child = _child()
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(str(folder)) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = ""
    if not answer:
        status = child.wait()
        _end()
        return f"the interpreter died (exit status {status})"
    said: str = json.loads(answer)
    return said


def interpret(folder: Path, jobs: Sequence[Job]) -> list[Outcome]:
    """Run every job in the child process. Raises AssertionError if a guard zone or an input changed."""
    rows: list[dict[str, object]] = []
    before: list[list[np.ndarray]] = []
    texts: dict[str, str] = {}
    for k, job in enumerate(jobs):
        source = job.source()
        file = texts.setdefault(source.text, f"kernel{len(texts)}")
        (folder / f"{file}.py").write_text(source.text)
        order = job.symbols or tuple(job.sizes)
        count = int(np.prod([dims.evaluate(g.extent, job.sizes) for g in job.program.grid]))
        whole: list[np.ndarray] = []
        for p, (buffer, given) in enumerate(zip(job.program.params * job.rows, job.inputs, strict=True)):
            size = dims.evaluate(buffer.size, job.sizes)
            data = np.full(size + 2 * GUARD, _poison(buffer.dtype, given is None), STORAGE[buffer.dtype.name])
            if given is not None:
                data[GUARD : GUARD + size] = given.reshape(-1)[:size]
            whole.append(data)
            np.save(folder / f"{k}_{p}.npy", _disk(data))
        before.append(whole)
        rows.append({
            "file": file, "entry": source.entry, "guard": GUARD,
            "points": min(count, STAYING) if source.persistent else count,
            "sizes": [job.sizes[order[a.index]] for a in source.arguments if a.kind == "size"],
            "params": [b.dtype.name for b in job.program.params * job.rows], "name": job.name,
            "rows": job.rows if job.variant.listed else 0,
            "descriptors": [_tensor(a, job.sizes) for a in source.arguments if a.descriptor is not None],
        })  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(rows))
    said = _ask(folder)
    assert not said, said[-6000:]
    errors: list[int] = json.loads((folder / "errors.json").read_text())
    return [_outcome(folder, k, job, before[k], errors[k]) for k, job in enumerate(jobs)]


def same_as_interpreter(job: Job, outcome: Outcome, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Raise AssertionError unless every buffer is as the meaning of the program says."""
    params, want = job.program.params, list[np.ndarray]()
    before = [
        _untouched(b, job.sizes) if x is None else x
        for b, x in zip(params * job.rows, job.inputs, strict=True)
    ]
    for k in range(0, len(before), len(params)):
        want += run_program(job.program, before[k : k + len(params)], job.sizes)
    for buffer, expected, got in zip(params * job.rows, want, outcome.arrays, strict=True):
        about = f"{job.name} {buffer.name}"
        if buffer.dtype.is_float:
            wide, right = got.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(wide, right, rtol=rtol, atol=atol, err_msg=about)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=about)


@dataclass(frozen=True)
class Built:
    """Machine code that was made for a GPU: its text (PTX, or AMD assembly) and facts."""

    text: str
    facts: KernelFacts

    @property
    def accesses(self) -> Counter[int]:
        """Bits of each access of global memory by one thread -> how many there are in the text."""
        found: Counter[int] = Counter()
        for vector, bits in re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", self.text):
            found[int(vector or 1) * int(bits)] += 1
        for count in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", self.text):
            found[8 * int(count, 16)] += 1
        return found


def print_triton(
    program: TileProgram, symbols: Sequence[str], target: Target, variant: Variant, name: str
) -> TritonSource:
    """As `emit_triton`, of a program that is legalised first."""
    return emit_triton(legalise_for_gpu(program, target), symbols, variant, name)


MACHINES: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64),
}  # fmt: skip


def build(folder: Path, source: TritonSource, machine: str = "sm_90") -> Built:
    """Build a kernel for a machine that need not be here."""
    backend, arch, lanes = MACHINES[machine]
    folder.mkdir(parents=True, exist_ok=True)
    job = BuildJob(source.text, source.entry, tuple(source.signature.items()), source.divisible, source.warps,
                   source.stages, backend, arch, lanes)  # fmt: skip
    _, text, facts = compile_job(job, folder)
    return Built(text, facts)


def _outcome(folder: Path, k: int, job: Job, before: Sequence[np.ndarray], error: int) -> Outcome:
    arrays: list[np.ndarray] = []
    for p, (buffer, old) in enumerate(zip(job.program.params * job.rows, before, strict=True)):
        new = np.load(folder / f"{k}_{p}.npy").view(old.dtype)
        for edge in (slice(0, GUARD), slice(len(new) - GUARD, len(new))):
            same = new[edge].tobytes() == old[edge].tobytes()
            assert same, f"{job.name}: {buffer.name} is written outside"
        assert job.inputs[p] is None or new.tobytes() == old.tobytes(), f"{job.name}: input {p} changed"
        arrays.append(new[GUARD : len(new) - GUARD])
    return Outcome(arrays, error)
