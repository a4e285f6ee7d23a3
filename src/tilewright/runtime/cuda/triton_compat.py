"""The only file that knows Triton's Python interface: text in, machine code and its facts out. For 3.6 to 3.9."""

# Triton has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.errors import BuildError

from .binary import resources
from .job import Box, Job, KernelFacts
from .ptx import mend_ptx, releases_first, waits_first

BINARY = {"cuda": ("cubin", "ptx"), "hip": ("hsaco", "amdgcn")}
"""By backend: the names of the machine code and of its readable form."""


_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{.*\border = \[([\d, ]+)\]\}>", re.MULTILINE)
_CUT = re.compile(r"tt\.reshape %[\w#]+ allow_reorder efficient_layout : tensor<([\dx]+x)\w+, (#\w+)> ->")
"""In Triton's code: a layout with its order of dims, and where a thread's registers are cut anew: sizes, layout."""

_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d,]+)\]>")
"""The type of a descriptor: of its elements, and the block."""

DRIVERS_TYPE = {8: 10, 9: 8, 10: 9}
"""Numbers of element types that the code of a kernel and the driver give differently (fp64, bf16, flushed fp32)."""


def version() -> str | None:
    """The version of the Triton that is installed, without importing it; None if there is none."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None
    except ValueError:  # a program has put something else in its place
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "unknown"


def can_wait() -> bool:
    """Whether the Triton that is installed has the calls of kernels that are launched early; does not import it."""
    if version() is None:
        return False
    found = importlib.util.find_spec("triton")
    places = found.submodule_search_locations if found is not None else None
    return any((Path(p) / "language/extra/cuda/gdc.py").is_file() for p in places or ())


def compile_job(job: Job, folder: Path) -> tuple[bytes, str, KernelFacts]:
    """Machine code, its readable form, and its facts. `folder` is private and empty; what is in it afterwards has no
    use. Raises BuildError with the first line of what Triton says."""
    try:
        built = _built(job, folder, "cache")
        if job.dialect == "triton" and job.local_sums and mixes_rows(built.asm["ttgir"]):
            built = _built(replace(job, local_sums=False), folder, "again")
    except Exception as error:
        raise BuildError(f"Triton refused {job.entry}: {_reason(error)}", phase="build") from error
    code, text = BINARY[job.backend]
    return built.asm[code], built.asm[text], _facts(job, built)


def _built(job: Job, folder: Path, cache: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    triton.knobs.cache.dir = str(folder / cache)
    with ExitStack() as calmed:
        if job.backend == "cuda":
            calmed.enter_context(_assembled_right())
        if not job.packing:
            calmed.enter_context(_unpacked())
        if not job.local_sums:
            calmed.enter_context(_summed_each_step())
        function = _function(job, folder / f"{job.entry}.py")
        attributes = {(k,): [["tt.divisibility", 16]] for k in job.divisible}
        source = _source(job, function, attributes)
        options: dict[str, Any] = {
            "num_warps": job.warps,
            "num_stages": job.stages,
            # Both defaults differ between versions; library functions keep denormals, as everywhere in this package.
            "enable_fp_fusion": job.fusion,
            "enable_reflect_ftz": False,
        }
        return triton.compile(source, target=GPUTarget(job.backend, job.arch, job.lanes), options=options)


def _source(job: Job, function: Any, attributes: dict[tuple[int], list[Any]]) -> Any:
    """A function with what its arguments are."""
    if job.dialect == "triton":
        from triton.compiler import ASTSource

        return ASTSource(function, dict(job.signature), {}, attributes)
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: _laid_out(kind) for name, kind in job.signature}
    return GluonASTSource(function, signature, {}, attributes)


def _laid_out(kind: str) -> str:
    """The type of an argument in Gluon, where one of a descriptor also says how blocks lie in shared memory."""
    found = _DESCRIPTOR.fullmatch(kind)
    if found is None:
        return kind
    from triton.experimental.gluon import language as gl

    element, block = found[1], [int(n) for n in found[2].split(",")]
    elements = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}
    default: Any = gl.NVMMASharedLayout.get_default_for
    layout = default(block, elements[element])
    return f"tensordesc<{element}{block},{layout!r}>"


def mixes_rows(text: str) -> bool:
    """Whether a thread's part of a sum may hold elements of several rows. The pass that moves sums of threads out of
    loops cuts a thread's registers into such parts as they lie; in 3.6 (not in 3.9) it does so too where those of a
    column lie side by side and not those of a row, along which it sums."""
    layouts = dict(_LAYOUT.findall(text))
    for shape, layout in _CUT.findall(text):
        order = layouts.get(layout, "").replace(" ", "").split(",")
        if order[0] != str(shape.count("x") - 1):
            return True
    return False


@contextmanager
def _assembled_right() -> Generator[None]:
    """With PTX in words that its assembler gets right."""
    from triton.backends.nvidia.compiler import CUDABackend

    usual = CUDABackend.make_cubin

    def assembled(self: Any, text: str, *rest: Any) -> bytes:
        return usual(self, mend_ptx(text), *rest)

    CUDABackend.make_cubin = assembled
    try:
        yield
    finally:
        CUDABackend.make_cubin = usual


@contextmanager
def _unpacked() -> Generator[None]:
    """Without LLVM's SLP vectoriser, which Triton (from 3.9 on) switches off for some targets alone; earlier ones can
    only leave out all that LLVM does before it generates code."""
    from triton._C.libtriton import llvm

    usual = llvm.optimize_module
    if "disable_slp_vectorizer" in (usual.__doc__ or ""):
        llvm.optimize_module = lambda *args, **rest: usual(*args, **{**rest, "disable_slp_vectorizer": True})
    else:
        llvm.optimize_module = lambda *args, **rest: None
    try:
        yield
    finally:
        llvm.optimize_module = usual


@contextmanager
def _summed_each_step() -> Generator[None]:
    """Without the pass that moves sums of threads out of loops. In 3.6 it asserts that a loop's sum has one reader."""
    from triton._C.libtriton import passes

    usual = passes.ttgpuir.add_optimize_thread_locality
    passes.ttgpuir.add_optimize_thread_locality = lambda manager: None
    try:
        yield
    finally:
        passes.ttgpuir.add_optimize_thread_locality = usual


def is_failed_pass(reason: str) -> bool:
    """Whether Triton refused a kernel because one of its passes failed over it."""
    return "PassManager::run failed" in reason


def _function(job: Job, path: Path) -> Any:
    """The jitted function; Triton reads its source from a real file."""
    path.write_text(job.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"tilewright_kernel_{job.entry}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return getattr(module, job.entry)


def _reason(error: BaseException) -> str:
    """The innermost cause, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {'; '.join(lines[-3:])}"[:600]


def _facts(job: Job, built: Any) -> KernelFacts:
    data = built.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(data, name, 0):
            raise BuildError(f"{job.entry} wants memory of its own from the driver ({name})", phase="build")
    code, text = BINARY[job.backend]
    found = _arguments(built.asm[text], job.backend)
    if job.backend == "cuda":
        registers, spills = resources(built.asm[code], data.name)
    else:
        registers, spills = (_field(built.asm[text], name) for name in ("vgpr_count", "vgpr_spill_count"))
    if job.max_spilled_bytes is not None and (spills or 0) > job.max_spilled_bytes:
        raise BuildError(f"{job.entry} spills {spills} bytes of a thread's registers", phase="build")
    return KernelFacts(
        entry=data.name,
        shared=data.shared,
        threads=data.num_warps * job.lanes,
        hidden=found - sum(_expanded(kind) for _, kind in job.signature),
        registers=registers,
        spills=spills,
        triton=version() or "unknown",
        boxes=_boxes(job, data),
        early=job.backend == "cuda" and waits_first(built.asm[text]),
        releases_first=job.backend == "cuda" and releases_first(built.asm[text]),
        persistent=job.persistent,
    )


def _expanded(kind: str) -> int:
    """How many arguments of the entry point one of the function is: a descriptor is followed by its extents and
    strides."""
    return 1 + 2 * (kind.count(",") + 1) if kind.startswith("tensordesc") else 1


def _boxes(job: Job, data: Any) -> tuple[Box, ...]:
    """What the launch needs to make descriptors."""
    count = sum(kind.startswith("tensordesc") for _, kind in job.signature)
    found = (getattr(data, "tensordesc_meta", None) or []) if count else []
    if len(found) != count:
        raise BuildError(f"Triton takes the descriptors of {job.entry} apart", phase="build")
    kinds = [int(m["elem_type"]) for m in found]
    kinds = [DRIVERS_TYPE.get(k, k) for k in kinds]
    return tuple(Box(k, m["swizzle"], tuple(m["block_size"])) for k, m in zip(kinds, found, strict=True))


def _arguments(text: str, backend: str) -> int:
    """How many arguments the entry point has."""
    if backend == "hip":
        found = re.search(r"^ *\.args:\n(.*?)^    \.group_segment", text, re.DOTALL | re.MULTILINE)
        return found[1].count(".offset:") if found else 0
    found = re.search(r"\.entry\s+\w+\s*\((.*?)\)", text, re.DOTALL)
    return found[1].count(".param") if found else 0


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(found[1]) if found else None
