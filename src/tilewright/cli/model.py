"""What MODEL, --input and --shape mean: a thing to compile, eager's version of it, and inputs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.artifact import load as artifact
from tilewright.artifact.way import LoadedWay
from tilewright.capture import onnx
from tilewright.errors import InputError
from tilewright.ways.programs import SUFFIX as PROGRAM
from tilewright.ways.programs import program_loader

from .request import Precision

SUFFIX = ".onnx"
ARTIFACT = ".tw"


@dataclass(frozen=True, slots=True)
class Model:
    """A named model: `target` goes to the compiler, `eager` is the same program as torch runs it.

    `names` are the inputs by position, `inputs` example inputs or None, `declared` what a file says of them.
    `load_seconds` is what it took to load what is compiled already.
    """

    name: str
    target: Callable[..., object] | Path
    eager: nn.Module
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...] | None
    declared: tuple[onnx.InputSpec, ...] = ()
    load_seconds: float = 0.0

    @property
    def runnable(self) -> nn.Module | Path:
        """What goes to other compilers."""
        is_exchanged = isinstance(self.target, Path) and self.target.suffix == SUFFIX
        return self.target if is_exchanged and isinstance(self.target, Path) else self.eager


class _Function(nn.Module):
    """A plain callable as a module."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Tensor) -> object:
        return self._call(*inputs)


def load(text: str, *, trust: bool = False) -> Model:
    """Resolve MODEL: a path that ends in `.onnx`, `.pt2` or `.tw`, or `package.module:function`.
    `trust`: run the machine code of an artifact whoever made it.

    Raises InputError for what cannot be found or returns the wrong thing, ModelError for a broken file.
    """
    if text.endswith(ARTIFACT):
        return _from_artifact(Path(text), trust=trust)
    if text.endswith(SUFFIX):
        path = Path(text)
        if not path.is_file():
            raise InputError(
                "no such file", phase="cli", place=text, hint="MODEL is a file or module:function"
            )
        module = onnx.load(path).eval()
        names = tuple(spec.name for spec in module.input_specs)
        return Model(path.name, path, module, names, None, module.input_specs)
    if text.endswith(PROGRAM):
        return _from_program(Path(text))
    module_name, colon, attribute = text.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        hint = f"give a path that ends in {SUFFIX}, {PROGRAM} or {ARTIFACT}, or package.module:function"
        if text.endswith(".py"):
            hint = f"name its function that returns (module, example_inputs): {Path(text).stem}:FUNCTION"
        raise InputError(f"{text!r} names no model", phase="cli", hint=hint)
    return _from_python(text, module_name, attribute)


def _from_program(path: Path) -> Model:
    """A saved exported program, with the inputs that it was exported with."""
    loader = program_loader()
    program = loader.load_program(str(path))
    loader.check_as_given(program, str(path))
    given, named = program.example_inputs or ((), {})
    inputs = tuple(x for x in (*given, *named.values()) if isinstance(x, Tensor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch uses a class of its own that it deprecates
        module = program.module()
    names = tuple(n.name for n in module.graph.find_nodes(op="placeholder"))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    if named or len(inputs) != len(given) or len(inputs) != len(names):
        raise InputError(
            "a program whose inputs are no plain tensors by position", phase="cli", place=str(path),
            hint="write a function that returns (program.module(), example_inputs), and name it: module:function",
        )  # fmt: skip
    return Model(path.name, path, module, names, inputs)


def _from_artifact(path: Path, *, trust: bool) -> Model:
    """An artifact: compiled already, and as torch would run the graph inside."""
    if not path.is_file():
        raise InputError(
            "it is a folder" if path.is_dir() else "no such file",
            phase="cli",
            place=str(path),
            hint="`compile MODEL -o FILE.tw` makes one",
        )
    start = time.perf_counter()
    loaded = artifact.load(path, trust=trust)
    seconds = time.perf_counter() - start
    assert isinstance(loaded.way, LoadedWay)
    free = {s.symbol: s.name for s in loaded.signature.sizes} | {
        s.name: s.name for s in loaded.signature.sizes
    }
    specs = tuple(
        onnx.InputSpec(
            t.name,
            t.dtype,
            None if t.shape is None else tuple(n if isinstance(n, int) else free.get(n) for n in t.shape),
        )
        for t in loaded.inputs
    )
    return Model(path.name, loaded, loaded.way.eager(), tuple(s.name for s in specs), None, specs, seconds)


def _from_python(text: str, module_name: str, attribute: str) -> Model:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        module_of = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(str(error), phase="cli", place=text, hint="run where it can be imported") from error
    except Exception as error:
        raise _theirs(f"module {module_name} cannot be imported", error, text) from error
    function = getattr(module_of, attribute, None)
    if not callable(function):
        what = "is not there" if function is None else "is no function"
        hint = "name a function of that module"
        raise InputError(
            f"{attribute!r} of module {module_name!r} {what}", phase="cli", place=text, hint=hint
        )
    try:
        made = function()
    except Exception as error:
        raise _theirs(f"{attribute}() raised", error, text) from error
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        hint = "return (module, example_inputs)"
        raise InputError("the function does not return a pair", phase="cli", place=text, hint=hint)
    target, given = made
    inputs = (given,) if isinstance(given, Tensor) else tuple(given)
    if not all(isinstance(value, Tensor) for value in inputs):
        raise InputError("example inputs must be tensors", phase="cli", place=text, hint="a tuple of tensors")
    module = target.eval() if isinstance(target, nn.Module) else _Function(target)
    runs = module if isinstance(target, nn.Module) else target
    return Model(text, runs, module, _parameter_names(target, len(inputs)), inputs)


def _theirs(what: str, error: Exception, text: str) -> InputError:
    """An error for what the user's own code has raised, with the line of it that raised last."""
    said = " ".join(str(error).split()) or "no message"
    where = text
    if isinstance(error, SyntaxError) and error.filename is not None:
        where = f"{error.filename}:{error.lineno}"
    elif frames := traceback.extract_tb(error.__traceback__):
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
    return InputError(
        f"{what}: {type(error).__name__}: {said}", phase="cli", place=where,
        hint="run it with python to see its own traceback",
    )  # fmt: skip


def _parameter_names(target: Callable[..., object], count: int) -> tuple[str, ...]:
    call = target.forward if isinstance(target, nn.Module) else target
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(call).parameters.values() if p.kind in kinds][:count]
    return tuple(names + [f"input{i}" for i in range(len(names), count)])


def placed(model: Model, device: str | None, precision: Precision | None) -> Model:
    """The model on a device, its weights and floating example inputs in a type. Raises InputError where it cannot be
    there, or where a file says itself in which type it computes."""
    wanted = None if precision is None else DTYPES[precision.value]
    if wanted not in (None, torch.float32) and isinstance(model.target, Path):
        raise InputError(
            f"a file has its own types: --precision {precision and precision.value}", phase="cli", op=model.name,
            hint="convert the file, or give package.module:function",
        )  # fmt: skip
    if device is not None and device.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"no device {device!r}", phase="cli", op="--device", hint=DEVICES)
    if device is None and (wanted is None or isinstance(model.target, Path)):
        return model
    try:
        where = torch.device(device) if device is not None else None
        torch.empty(0, device=where)  # a model without weights says nothing
        modules = [m.to(device=where) for m in (model.eager, model.target) if isinstance(m, nn.Module)]
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise InputError(f"no device {device!r}: {said}", phase="cli", hint=DEVICES) from error
    if not isinstance(model.target, Path) and wanted is not None:
        for module in modules:
            module.to(dtype=wanted)
    return replace(model, inputs=None if model.inputs is None else moved(model.inputs, where, wanted))


def moved(
    inputs: Sequence[Tensor], device: torch.device | None, dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Inputs on a device; floating ones in a type."""
    return tuple(t.to(device=device, dtype=dtype if t.is_floating_point() else None) for t in inputs)


DEVICES = "cpu, cuda or cuda:0"

DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp64": torch.float64, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip
"""Types by their short names."""


def parse_dtype(text: str) -> torch.dtype:
    """`fp16`, or what torch calls it, `float16`. Raises InputError."""
    found = DTYPES.get(text) or getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        near = difflib.get_close_matches(text, DTYPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(DTYPES)}"
        raise InputError(f"not a type: {text!r}", phase="cli", op="--dtype", hint=hint)
    return found


SAVED = "`numpy.save` writes one, of numbers"


def read_array(path: str) -> Tensor:
    """The array in a `.npy` file. Objects are refused: nothing of a file is ever executed."""
    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array))
    except FileNotFoundError:
        raise InputError("no such file", phase="cli", place=path, hint=SAVED) from None
    except (OSError, ValueError, EOFError, TypeError, AttributeError) as error:
        raise InputError(f"not a .npy array: {error}", phase="cli", place=path, hint=SAVED) from error


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x3x640x640` as sizes; `scalar` for no dims. Raises InputError."""
    if text == "scalar":
        return ()
    parts = text.lower().split("x")
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"not a shape: {text!r}", phase="cli", hint="write 1x3x640x640")
    return tuple(int(part) for part in parts)


def parse_pairs(texts: Sequence[str], what: str, mark: str = "=") -> dict[str, str]:
    """`name=value` arguments as a mapping, `mark` between the two. Raises InputError."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition(mark) if mark != "=" else text.rpartition("=")
        if not sign or not name or not value:
            raise InputError(
                f"{what} {text!r} is not name{mark}value", phase="cli", hint=f"write {what} NAME{mark}VALUE"
            )
        if name in found:
            raise InputError(f"{what} names {name!r} twice", phase="cli", hint="give it once")
        found[name] = value
    return found
