"""What MODEL, --input and --shape mean: a thing to compile, eager's version of it, and inputs."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.capture import onnx
from tilewright.errors import InputError, TilewrightError

SUFFIX = ".onnx"


@dataclass(frozen=True, slots=True)
class Model:
    """A named model: `target` goes to the compiler, `eager` is the same program as torch runs it.

    `names` are the inputs by position, `inputs` example inputs or None, `declared` what a file says of them.
    """

    name: str
    target: nn.Module | Path
    eager: nn.Module
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...] | None
    declared: tuple[onnx.InputSpec, ...] = ()


class _Function(nn.Module):
    """A plain callable as a module."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Tensor) -> object:
        return self._call(*inputs)


def load(text: str) -> Model:
    """Resolve MODEL: a path that ends in `.onnx`, or `package.module:function`.

    Raises InputError for what cannot be found or returns the wrong thing, ModelError for a broken file.
    """
    if text.endswith(SUFFIX):
        path = Path(text)
        if not path.is_file():
            raise InputError(
                "no such file", phase="cli", place=text, hint="MODEL is a file or module:function"
            )
        module = onnx.load(path).eval()
        names = tuple(spec.name for spec in module.input_specs)
        return Model(path.name, path, module, names, None, module.input_specs)
    module_name, colon, attribute = text.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        hint = f"give a path that ends in {SUFFIX}, or package.module:function"
        raise InputError(f"{text!r} names no model", phase="cli", hint=hint)
    return _from_python(text, module_name, attribute)


def _from_python(text: str, module_name: str, attribute: str) -> Model:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise InputError(str(error), phase="cli", place=text, hint="run where it can be imported") from error
    except AttributeError as error:
        raise InputError(
            str(error), phase="cli", place=text, hint="name a function of that module"
        ) from error
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        hint = "return (module, example_inputs)"
        raise InputError("the function does not return a pair", phase="cli", place=text, hint=hint)
    target, given = made
    inputs = (given,) if isinstance(given, Tensor) else tuple(given)
    if not all(isinstance(value, Tensor) for value in inputs):
        raise InputError("example inputs must be tensors", phase="cli", place=text, hint="a tuple of tensors")
    module = target.eval() if isinstance(target, nn.Module) else _Function(target)
    return Model(text, module, module, _parameter_names(target, len(inputs)), inputs)


def _parameter_names(target: Callable[..., object], count: int) -> tuple[str, ...]:
    call = target.forward if isinstance(target, nn.Module) else target
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(call).parameters.values() if p.kind in kinds][:count]
    return tuple(names + [f"input{i}" for i in range(len(names), count)])


def inputs_for(
    model: Model, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> tuple[Tensor, ...]:
    """Inputs by position: `--input` files, else random of `--shape`, else example inputs or declared sizes.

    Raises InputError for unknown names, unreadable files, and a dynamic size that no `--shape` fixes.
    """
    for name in (*files, *shapes):
        if name not in model.names:
            hint = f"the inputs are {', '.join(model.names)}"
            raise InputError(f"no input is called {name!r}", phase="cli", op=model.name, hint=hint)
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for i, name in enumerate(model.names):
        if name in files:
            found.append(read_array(files[name]))
        elif model.inputs is not None and name not in shapes:
            found.append(model.inputs[i])
        else:
            dtype = model.inputs[i].dtype if model.inputs is not None else _dtype(model, i)
            shape = shapes[name] if name in shapes else _declared(model, i)
            found.append(_random(shape, dtype, generator))
    return tuple(found)


def typical_inputs(model: Model, seed: int = 0) -> tuple[Tensor, ...]:
    """Random inputs of the first typical sizes that a file takes. Raises what it says where it takes none."""
    refused: Exception | None = None
    for shapes in onnx.typical_shapes(model.declared):
        found = inputs_for(model, {}, dict(zip(model.names, shapes, strict=True)), seed)
        try:
            model.eager(*found)
        except (TilewrightError, RuntimeError) as error:
            refused = refused or error
        else:
            return found
    raise refused or InputError("no typical sizes fit", phase="cli", op=model.name, hint="give --shape")


def _dtype(model: Model, i: int) -> torch.dtype:
    dtype = model.declared[i].dtype
    if dtype is None:
        raise InputError(
            "not a tensor input", phase="cli", op=model.declared[i].name, hint="use the Python API"
        )
    return dtype


def _declared(model: Model, i: int) -> tuple[int, ...]:
    spec = model.declared[i]
    fixed = tuple(size for size in spec.dims or () if isinstance(size, int))
    if spec.dims is None or len(fixed) != len(spec.dims):
        typical = next(onnx.typical_shapes([spec]))[0]
        sizes = [str(size) for size in (typical if spec.dims is not None else (1,))]
        shown = ", ".join("?" if size is None else str(size) for size in spec.dims or ("...",))
        hint = f"give for instance --shape {spec.name}={'x'.join(sizes)}, or --input"
        raise InputError(f"input {spec.name!r} has dynamic sizes ({shown})", phase="cli", hint=hint)
    return fixed


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal floats; integers and bools 0 or 1, which are valid wherever an index or a mask is meant."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def read_array(path: str) -> Tensor:
    """The array in a `.npy` file. Objects are refused: nothing of a file is ever executed."""
    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array))
    except FileNotFoundError:
        raise InputError("no such file", phase="cli", place=path) from None
    except (OSError, ValueError, EOFError, TypeError, AttributeError) as error:
        raise InputError(f"not a .npy array: {error}", phase="cli", place=path) from error


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
            raise InputError(f"{what} {text!r} is not name{mark}value", phase="cli")
        if name in found:
            raise InputError(f"{what} names {name!r} twice", phase="cli")
        found[name] = value
    return found
