"""Matching what a caller passes with what an imported model declares."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.arrays import tensor_of_array
from tilewright.errors import InputError
from tilewright.tuning.input_limits import EXAMPLES

from .module import InputSpec, OnnxModule

ArrayLike = Tensor | np.ndarray | np.generic | int | float | bool


def typical_shapes(specs: Sequence[InputSpec]) -> Iterator[list[tuple[int, ...]]]:
    """Shapes for all inputs, most typical first: declared sizes, and `EXAMPLES.undeclared_sizes` for others. Not every
    model takes all of them."""
    for first, rest in EXAMPLES.undeclared_sizes:
        yield [
            tuple(n if isinstance(n, int) else first if k == 0 else rest for k, n in enumerate(s.dims or ()))
            for s in specs
        ]


def bind_inputs(
    module: OnnxModule, args: Sequence[ArrayLike], kwargs: Mapping[str, ArrayLike]
) -> tuple[Tensor, ...]:
    """The inputs of `module` as tensors, in its own order.

    `args` by position, `kwargs` by the model's input names; numpy arrays share memory where they can. Raises
    InputError (place: the input's name) for a missing, doubled or unknown input, a wrong rank, dtype, size or
    device.
    """
    specs = module.input_specs
    if not kwargs and len(args) == len(specs):
        for spec, value in zip(specs, args, strict=True):
            if not spec.admits(value):
                break
        else:
            _check_devices(module, args)  # type: ignore[arg-type]
            return tuple(args)  # type: ignore[return-value]
    names = [s.name for s in specs]
    if len(args) > len(specs):
        raise _error(
            f"{len(args)} inputs were given, the model takes {len(specs)}", "", f"it takes {', '.join(names)}"
        )
    given: dict[str, ArrayLike] = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            same = [n for n in names if n.casefold() == name.casefold()]
            close = same or difflib.get_close_matches(name, names, 1)
            raise _error(
                f"the model has no input {name!r}",
                name,
                f"did you mean {close[0]!r}?" if close else f"its inputs are {', '.join(names)}",
            )
        if name in given:
            raise _error(f"input {name!r} is given twice", name, "by position or by name, not both")
        given[name] = value
    missing = [n for n in names if n not in given]
    if missing:
        raise _error(f"missing input {', '.join(map(repr, missing))}", missing[0], f"pass {missing[0]}=...")
    bound = tuple(_check(spec, _tensor(spec, given[spec.name])) for spec in specs)
    _check_devices(module, bound)
    return bound


def _check_devices(module: OnnxModule, bound: Sequence[Tensor]) -> None:
    """InputError unless all inputs lie where the weights lie (or where the first input lies)."""
    held = module.device()
    for spec, value in zip(module.input_specs, bound, strict=True):
        if spec.dtype is None:
            continue
        held = held or value.device
        if value.device != held:
            raise _error(
                f"input {spec.name!r} is on {value.device}, the model on {held}",
                spec.name,
                f"move the input to {held}, or the model to {value.device}",
            )


def _error(message: str, place: str, hint: str) -> InputError:
    return InputError(message, phase="input", place=place and f"input {place}", hint=hint)


def _tensor(spec: InputSpec, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return tensor_of_array(np.asanyarray(value), f"input {spec.name}")
    if isinstance(value, (bool, int, float)):
        return _number(spec, value)
    if spec.dtype is None and value is None:
        return None  # type: ignore[return-value]  (an optional that is absent)
    if spec.dtype is None and isinstance(value, (list, tuple)):
        return [_tensor(spec, v) for v in value]  # type: ignore[return-value]
    raise _error(
        f"input {spec.name!r} is a {type(value).__name__}", spec.name, "pass a tensor or a numpy array"
    )


def _number(spec: InputSpec, value: float) -> Tensor:
    """A Python number as a tensor; InputError where the declared type would make another number of it."""
    try:
        made = torch.tensor(value, dtype=spec.dtype)
        fits = made.is_floating_point() or made.is_complex() or made.item() == value
    except (RuntimeError, ValueError, OverflowError):
        made, fits = torch.empty(()), False
    if not fits:
        wanted = str(spec.dtype).removeprefix("torch.")
        raise _error(
            f"input {spec.name!r} is {value}, which is no {wanted}", spec.name, "pass a number that fits"
        )
    return made


def _check(spec: InputSpec, value: Tensor) -> Tensor:
    if spec.dtype is None:
        return value
    if value.dtype != spec.dtype:
        wanted = str(spec.dtype).removeprefix("torch.")
        raise _error(
            f"input {spec.name!r} has dtype {str(value.dtype).removeprefix('torch.')}, the model takes {wanted}",
            spec.name,
            f"convert it to {wanted}",
        )
    if spec.dims is None:
        return value
    declared = ", ".join("?" if d is None else str(d) for d in spec.dims)
    if value.dim() != len(spec.dims):
        raise _error(
            f"input {spec.name!r} has {value.dim()} dims, the model takes {len(spec.dims)}: [{declared}]",
            spec.name,
            "add or remove a dim (a batch dim of 1?)",
        )
    for i, (size, wanted) in enumerate(zip(value.shape, spec.dims, strict=True)):
        if isinstance(wanted, int) and size != wanted:
            raise _error(
                f"dim {i} of input {spec.name!r} is {size}, the model takes {wanted}: [{declared}]",
                spec.name,
                f"give it the size {wanted}",
            )
    return value
