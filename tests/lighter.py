"""What torch and builds do again and again within a run of the tests, to the same end: done once, or with less ado.

Nothing here changes what a test sees: torch's tables get the same entries, and a library is the one that the same
compiler made of the same text.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._export.utils as export_utils
from torch._C import DispatchKey  # pyright: ignore[reportPrivateImportUsage]
from torch._dynamo import guards
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import exported_program

from tilewright.runtime.cpu import toolchain

RUN_COMPILER = toolchain._run_compiler
OVERRIDDEN = exported_program._override_composite_implicit_decomp
_GRADIENT_KEYS = exported_program._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE
_has_fake_rule = exported_program._is_op_registered_to_fake_rule
_not_differentiated = cache(partial(autograd_not_implemented, deferred_error=True))


@contextmanager
def _overridden(taken_apart: Mapping[OpOverload, Callable[..., object]]) -> Iterator[None]:
    """As `_override_composite_implicit_decomp` of torch, which registers twenty kernels for each of 600 ops one by one,
    each time that a program is exported: half of what this takes."""
    before = [(op, op.py_kernels.copy()) for op in taken_apart]
    for op, kernels in before:
        own = export_utils._get_decomp_for_cia(op)
        if not _has_fake_rule(op):
            exported_program.register_op_impl(op)(partial(_under_fakes, own))
        op.py_kernels.update(
            dict.fromkeys(exported_program._BACKEND_KEYS_TO_OVERRIDE, own)
            | dict.fromkeys(_GRADIENT_KEYS, _not_differentiated(op))
            | kernels
            | {DispatchKey.CompositeImplicitAutograd: taken_apart[op]}
        )
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in before:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            exported_program._deregister_op_impl(op)


def _under_fakes(
    own: Callable[..., object], mode: FakeTensorMode, op: OpOverload, *args: Any, **how: Any
) -> object:
    with mode:
        return own(*args, **how)


def lighten_torch() -> None:
    """Capturing costs what it has to."""
    exported_program._override_composite_implicit_decomp = _overridden
    # Exporting asks the dispatcher for all composite ops each time; they do not change within a process.
    export_utils._materialize_cpp_cia_ops = cache(export_utils._materialize_cpp_cia_ops)
    # How long guards take, with all caches emptied before, is told to a log alone.
    guards.profile_guard_manager = lambda *_: 0.0
    for devices in (torch.cuda, torch.xpu):
        if not devices.is_available():
            # Every seed is kept for a device that never comes, with a stack as text that says who asked.
            devices.manual_seed_all = lambda seed: None


def lighten_disks() -> None:
    """Nothing here has to outlive the loss of power."""
    os.fsync = lambda _: None


def share_libraries(folder: Path) -> None:
    """Each test has an empty cache, so that it builds, and many build the same: who runs the machine's g++ on what it
    was run on before gets what it made then, and its headers are read once for all. What it makes of headers that were
    read before is the same to the bit. All processes of a run share `folder`."""
    usual = (shutil.which("g++"),)

    def once(compiler: toolchain.Compiler, names: Sequence[str], flags: Sequence[str], place: Path) -> None:
        if compiler.command != usual or compiler.family != "gcc":
            RUN_COMPILER(compiler, names, flags, place)
            return
        words = [compiler.version, toolchain._header_digest(), *flags]
        kept = folder / _named([*words, "--", *((place / name).read_text() for name in names)])
        if not kept.exists():
            headers = _headers(folder / _named(words), [*compiler.command, *flags])
            RUN_COMPILER(compiler, names, [*flags, "-I", str(headers)], place)
            _put(kept, partial(shutil.copyfile, place / toolchain.LIBRARY))
        else:
            shutil.copyfile(kept, place / toolchain.LIBRARY)

    toolchain._run_compiler = once


def _named(texts: Sequence[str]) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _headers(place: Path, start: Sequence[str]) -> Path:
    """A folder with the header of all generated code, read with the flags of a call."""
    made = place / "kernel.h.gch"
    if not made.exists():
        place.mkdir(exist_ok=True)
        command = [
            *start,
            "-I",
            str(toolchain.HEADERS),
            "-x",
            "c++-header",
            str(toolchain.HEADERS / "kernel.h"),
        ]
        _put(made, lambda to: subprocess.run([*command, "-o", str(to)], check=False, capture_output=True))
    return place


def _put(place: Path, make: Callable[[Path], object]) -> None:
    """A file that is there whole or not at all."""
    fresh = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
    make(fresh)
    if fresh.exists():
        fresh.replace(place)
