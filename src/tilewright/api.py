"""Entry points: the backend of `torch.compile`, and `compile` for modules, functions, exported programs and ONNX."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tilewright.capture.exported import exported
from tilewright.capture.onnx import OnnxModule, load
from tilewright.capture.placement.device import ADMITTED
from tilewright.capture.torch_declarations import correct_declarations
from tilewright.pipeline.compiler import COMPILATIONS, Compilation
from tilewright.runtime.call.asked import asking, reading
from tilewright.runtime.call.dynamic_dims import DimsLike, Naming
from tilewright.runtime.call.kept_weights import KeptWeights
from tilewright.runtime.call.model import CompiledModel, TargetWay
from tilewright.runtime.call.module import CompiledModule
from tilewright.runtime.cuda import executable
from tilewright.runtime.own.ahead import built_ahead
from tilewright.runtime.stats import STATS, Stats

from .errors import InputError, UnsupportedError, names_keywords
from .keep.captures import OUTSIDE, FileBytes
from .options import Options, OptionsLike
from .ways.files import FileWay, program_way
from .ways.programs import SUFFIX as PROGRAM
from .ways.programs import KeptProgram, ProgramFileWay, program_loader
from .ways.weights import named_weights

if TYPE_CHECKING:
    from .ways.traced import backend

Target = torch.nn.Module | Callable[..., object] | torch.export.ExportedProgram | str | os.PathLike[str]


__all__ = ["backend", "compilations", "compile", "reset", "stats", "synchronize"]
correct_declarations()


def __getattr__(name: str) -> object:
    """The backend of `torch.compile`, which torch's entry point names here: it brings all of Dynamo, a second of
    imports that model files do without."""
    if name == "backend":
        return importlib.import_module("tilewright.ways.traced").backend
    raise AttributeError(f"module 'tilewright.api' has no attribute {name!r}")


def stats() -> Stats:
    """Counters since the start of the process or the last `reset`."""
    return STATS.snapshot()


def compilations() -> tuple[Compilation, ...]:
    """How each graph was compiled, oldest first, with its coverage, kernels, calls and trace: of all graphs
    that can still run, since the start of the process or the last `reset`."""
    return COMPILATIONS()


def synchronize() -> None:
    """Wait until the GPUs that compiled graphs have used are done. Raises what their kernels found wrong, such as
    IndexOutOfRange, which else the next call raises."""
    executable.synchronize()


def reset() -> None:
    """Forget what torch has compiled and set all counters to 0. Compiled models stay usable."""
    torch._dynamo.reset()
    STATS.reset()
    COMPILATIONS.clear()


# --- compile ---------------------------------------------------------------------


@names_keywords
def compile(
    target: Target,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    *,
    dims: DimsLike | str | None = None,
    device: str | torch.device | None = None,
    strict: bool = False,
    freeze: bool | None = None,
    mode: str | None = None,
    options: OptionsLike = None,
) -> CompiledModel:
    """Compile a module, a function, an exported program, or the path of an ONNX file or of a saved exported program.

    `example_inputs` (a tuple, or a mapping by name) compiles now, else the first call does. `dims` names dynamic dims
    by input and position, `{"x": {0: "batch", 1: ("length", 2, 512)}}`, with the range it may have; one graph then
    serves all sizes. `dims="oblivious"` lets sizes 0 and 1 share it. `strict` raises UnsupportedError where an op would
    run as a library call by need. `freeze` makes weights constants (the default for files and exported programs).
    `mode` is one of those of `torch.compile` (`backend` says what they mean); what `options` say goes first.
    Values other than tensors are read when compiling. What was read is compared on each call, however deep it lies, as
    torch's guards say; a change compiles anew.
    """
    wanted = Options.make(options, mode=mode)
    if strict:
        wanted = wanted.replace(strict=True)
    if freeze is not None:
        wanted = wanted.replace(freeze=freeze)
    if dims is not None and not isinstance(dims, Mapping) and dims != "oblivious":
        raise InputError(f"dims cannot be {dims!r}", phase="input", hint='a mapping or "oblivious"')
    with asking(runs=False):
        naming = Naming(dims if isinstance(dims, Mapping) else {})
        way = _way(target, wanted, naming, _device(device), oblivious=dims == "oblivious")
        model = _model(way, target)
        if isinstance(example_inputs, (Tensor, np.ndarray)):
            raise InputError("example_inputs is one tensor", phase="input", hint="pass a tuple: (x,)")
        if isinstance(example_inputs, Mapping):
            model.prepare((), dict(example_inputs))
        elif example_inputs is not None:
            model.prepare(tuple(example_inputs), {})
    return model


def _model(way: TargetWay, target: Target) -> CompiledModel:
    """What users hold: a module where a module, a file or an exported program was compiled."""
    if isinstance(target, torch.nn.Module):
        return CompiledModule(way, target)
    if isinstance(target, (str, os.PathLike, torch.export.ExportedProgram)):
        return CompiledModule(way, KeptWeights(named_weights(way), way.device))
    return CompiledModel(way)


def _device(wanted: str | torch.device | None) -> torch.device | None:
    if wanted is None:
        return None
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise InputError(f"not a device: {wanted!r}", phase="input", hint='"cpu" or "cuda"') from error
    if device.type not in ADMITTED:
        raise UnsupportedError(f"device {device}", phase="input", hint='"cpu" or "cuda"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"there is no {device} here", phase="input", hint="torch.cuda.is_available() is False"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no {device} here", phase="input", hint=f"there are {torch.cuda.device_count()} GPUs"
        )
    return device


def _way(
    target: Target, options: Options, naming: Naming, device: torch.device | None, *, oblivious: bool
) -> TargetWay:
    if isinstance(target, (str, os.PathLike)):
        path = os.fspath(target)
        if path.endswith(PROGRAM):
            return _program_file(path, options, device)
        if not path.endswith(".onnx"):
            hint = "give the path of an ONNX model, or of an exported program (.pt2)"
            raise InputError(f"{path} is no .onnx or {PROGRAM} file", phase="input", hint=hint)
        with reading():
            file = FileBytes.of(path, OUTSIDE) if options.cache else None
            module = _moved(load(path), device)
        return FileWay(module, options, naming, device, path, file)
    if device is not None:
        held = (*target.parameters(), *target.buffers()) if isinstance(target, torch.nn.Module) else ()
        if any(t.device.type != device.type or device.index not in (None, t.device.index or 0) for t in held):
            raise InputError(
                f"the module is not on {device}", phase="input", hint=f"move it with .to({str(device)!r})"
            )
    _check_target(target)
    if isinstance(target, torch.export.ExportedProgram):
        return program_way(exported(target), options)
    if callable(target):
        from .ways.traced import Session, TracedWay  # as above

        return TracedWay(target, Session(options), naming, oblivious=oblivious)
    raise InputError(
        f"cannot compile a {type(target).__name__}", phase="input",
        hint="give a module, a function, an exported program, or the path of a model file",
    )  # fmt: skip


def _program_file(path: str, options: Options, device: torch.device | None) -> TargetWay:
    """A file of an exported program: traced once, by whoever compiles it first."""
    if device is not None and device.type != "cpu":
        raise InputError(
            "a file of an exported program names its device itself", phase="input", place=path,
            hint="export it on that device",
        )  # fmt: skip
    file = FileBytes.of(path, b"") if options.cache else None
    kept = None if file is None else KeptProgram(file, options)
    known = None if kept is None else kept.get()
    if known is not None:
        return ProgramFileWay(known, path)
    with reading():
        loader = program_loader()
        program = loader.load_program(path)
    with built_ahead(program.state_dict.values(), options):
        captured = loader.captured_program(program, path)
    made = program_way(captured, options)
    if kept is not None:
        kept.put(made)
    return ProgramFileWay(made, path)


def _check_target(target: object) -> None:
    """Raise InputError for what can be called but is no program."""
    if isinstance(target, type):
        raise InputError(
            f"{target.__name__} is a class", phase="input", hint=f"make an instance: {target.__name__}(...)"
        )
    if isinstance(target, CompiledModel):
        raise InputError("this is compiled already", phase="input", hint="compile what it was made from")
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise UnsupportedError("scripted programs", phase="input", hint="compile what it was scripted from")


def _moved(module: OnnxModule, device: torch.device | None) -> OnnxModule:
    return module if device is None else module.to(device)
