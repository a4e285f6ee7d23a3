"""Triton sources to machine code: from the store if it is there, else from the build workers, several at once."""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tilewright import progress
from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import BuildError, KernelRefused, SharedMemoryExceeded
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import SPECIALISED

from . import triton_compat
from .job import Job, KernelFacts
from .workers import BuilderDied, workers

LOG = logging.getLogger("tilewright")

CODE = "kernel.bin"
TEXT = "kernel.asm"
SOURCE = "kernel.py"
FACTS = "facts.json"
_FORMAT = "triton-4"  # part of every key: raise it when the meaning of an entry changes
_FACTS = " ".join(f.name for f in fields(KernelFacts))  # another part: entries of other fields are no answer


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel in machine code: the folder of its entry in the store, and its facts. With an `image`, that is the code,
    and the folder is only a name for it."""

    folder: Path
    facts: KernelFacts
    image: bytes | None = field(default=None, repr=False)

    @property
    def code(self) -> bytes:
        """The cubin or hsaco."""
        if self.image is not None:
            return self.image
        try:
            return (self.folder / CODE).read_bytes()
        except OSError as error:
            raise _gone(error) from error

    @property
    def assembly(self) -> str:
        """PTX, or AMD assembly."""
        try:
            return (self.folder / TEXT).read_text(encoding="utf-8")
        except OSError as error:
            raise _gone(error) from error


def job_of(source: TritonSource, target: Target) -> Job:
    """What a worker needs to know."""
    return Job(
        text=source.text,
        entry=source.entry,
        signature=tuple(source.signature.items()),
        divisible=source.divisible,
        warps=source.warps,
        stages=source.stages,
        backend=target.backend,
        arch=int(target.arch) if target.arch.isdecimal() else target.arch,
        lanes=target.lanes,
        fusion=source.contracted,
        dialect=source.dialect,
        persistent=source.persistent,
        max_spilled_bytes=SPECIALISED.max_spilled_bytes if source.dialect == "gluon" else None,
    )


def build_kernels(
    sources: Sequence[TritonSource],
    target: Target,
    store: ContentStore,
    processor_seconds: float | None = None,
) -> list[BuiltKernel]:
    """One kernel for each source, in order. Needs no GPU. A compiler may compute for `processor_seconds` over each.

    Raises KernelRefused for those that do not build, with Triton's words for the first, SharedMemoryExceeded for one
    that wants more shared memory than `target` has, and another BuildError where it is not a kernel's fault."""
    version = triton_compat.version()
    if version is None:
        raise BuildError("Triton is not installed", phase="build", hint="pip install triton")
    texts = [job_of(source, target).to_json() for source in sources]
    keys = [digest(_FORMAT, _FACTS, version, text) for text in texts]
    found = {key: store.get(key) for key in keys}
    missing = {key: text for key, text in zip(keys, texts, strict=True) if found[key] is None}
    STATS.cache_hits += len(found) - len(missing)
    refused: dict[str, KernelRefused] = {}
    failed: BuildError | None = None
    answers = workers().submit(list(missing.values()), processor_seconds) if missing else ()
    for number, ((key, text), answer) in enumerate(zip(missing.items(), answers, strict=True)):
        progress.count("build", number, len(missing))
        try:
            found[key] = _stored(store, key, text, _answer(text, answer, processor_seconds))
            STATS.triton += 1
        except KernelRefused as error:
            refused[key] = error
        except BuildError as error:  # the others are waited for, so that none is still being built
            failed = failed or error
    if failed is not None:
        raise failed
    if refused:
        first = next(iter(refused.values()))
        raise KernelRefused(first.message, tuple(n for n, key in enumerate(keys) if key in refused))
    built = [_loaded(found[key]) for key in keys]
    for place, b in enumerate(built):
        check_shared(b.facts, target, place)
    return built


def _answer(job: str, first: Future[str], processor_seconds: float | None) -> str:
    """A worker's answer to a job; where LLVM died over it, or a pass of Triton's failed, another one's, to the job
    without what may be left out."""
    full = Job.from_json(job)
    try:
        answer = first.result()
    except BuilderDied:
        return _built_with_fewer_passes(replace(full, packing=False), "LLVM died over", processor_seconds)
    if triton_compat.is_failed_pass(_refusal(answer)):
        return _built_with_fewer_passes(
            replace(full, local_sums=False), "Triton failed over", processor_seconds
        )
    return answer


def _built_with_fewer_passes(job: Job, what: str, processor_seconds: float | None) -> str:
    LOG.warning("%s kernel %s, which is built again with fewer of its passes", what, job.entry)
    return workers().submit([job.to_json()], processor_seconds)[0].result()


def _refusal(answer: str) -> str:
    """Why a worker refused a job; empty if it did not."""
    try:
        parts = json.loads(answer)
    except ValueError:
        return ""
    return str(parts.get("error", "")) if isinstance(parts, dict) else ""


def _stored(store: ContentStore, key: str, job: str, answer: str) -> Path:
    """The entry of a worker's answer."""
    try:
        parts = json.loads(answer)
        if "error" in parts:
            raise KernelRefused(str(parts["error"]))
        files = {
            CODE: base64.b64decode(parts["code"], validate=True),
            TEXT: parts["text"].encode(),
            SOURCE: json.loads(job)["text"].encode(),
            FACTS: json.dumps(parts["facts"]).encode(),
        }
        KernelFacts.from_json(files[FACTS].decode())
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise BuildError(f"a build worker gave no answer: {error}", phase="build") from error
    return store.put(key, files)


def _loaded(folder: Path | None) -> BuiltKernel:
    assert folder is not None
    try:
        facts = (folder / FACTS).read_text(encoding="utf-8")
    except OSError as error:
        raise _gone(error) from error
    return BuiltKernel(folder, KernelFacts.from_json(facts))


def _gone(error: OSError) -> BuildError:
    """What it means that an entry which was whole cannot be read."""
    return BuildError(
        f"a built kernel has vanished from the cache: {error}", phase="load", hint="compile the model again"
    )


def check_shared(facts: KernelFacts, target: Target, kernel: int = 0) -> None:
    """Raise SharedMemoryExceeded if a kernel needs more shared memory than a block of `target` may have."""
    level = target.level(MemoryKind.SHARED)
    if level is not None and facts.shared > level.capacity:
        raise SharedMemoryExceeded(
            f"{facts.entry} needs {facts.shared} bytes of shared memory, {target.name} has {level.capacity}",
            kernel, facts.shared, level.capacity,
        )  # fmt: skip
