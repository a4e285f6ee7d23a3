"""A module or function as an exported program: the form in which it can be kept."""

from __future__ import annotations

import inspect
import keyword
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tilewright.capture.loops.recurrent import recurrent_loops
from tilewright.capture.loops.spelling.exported import rolled_module
from tilewright.errors import InputError, UnsupportedError
from tilewright.runtime.call.dynamic_dims import Dim, Example, Naming, TensorLike, by_name

Place = tuple[int, int]
"""Number of a flat argument and number of its dim."""


class _Function(nn.Module):
    """A plain callable as a module, whose signature it has."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)


def export(
    target: Callable[..., object], examples: Sequence[Example], naming: Naming
) -> torch.export.ExportedProgram:
    """`target` for calls like the last of `examples`: dims that `naming` names, and those in which examples of its kind
    differ, are free. Raises UnsupportedError where torch cannot export it, InputError without an example."""
    if not examples:
        raise InputError("nothing is compiled yet", phase="save", hint="call it, or pass example_inputs")
    last = examples[-1]
    if any(isinstance(x, torch.Tensor) for x in last.leaves):
        raise UnsupportedError(
            "inputs that are no plain tensors cannot be kept", phase="save",
            hint="let the model take plain tensors, and make the others inside",
        )  # fmt: skip
    free = _free_dims(target, examples, naming)
    leaves = [
        x.make([max(2, n) if (k, d) in free else n for d, n in enumerate(x.shape)])
        if isinstance(x, TensorLike)
        else x
        for k, x in enumerate(last.leaves)
    ]
    args, kwargs = pytree.tree_unflatten(leaves, last.spec)
    shapes = [
        {d: dim for (of, d), dim in free.items() if of == k} if isinstance(x, TensorLike) else None
        for k, x in enumerate(last.leaves)
    ]
    dims_of_args, dims_of_kwargs = pytree.tree_unflatten(shapes, last.spec)
    module = target if isinstance(target, nn.Module) else _Function(target)
    dynamic = _by_parameter(module, dims_of_args, dims_of_kwargs) if free else None
    try:
        with torch.no_grad(), recurrent_loops(), warnings.catch_warnings():
            # of recurrent layers, whose own list of weights holds the parameters themselves
            warnings.filterwarnings("ignore", message=r"The tensor attributes? \S*_flat_weights")
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
            loops = rolled_module(program)
            if loops is None:
                return program
            return torch.export.export(loops, args, kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        if "does not require grad" in lines[0]:  # exported without gradients, as all that is kept
            raise UnsupportedError(
                "a program that takes gradients cannot be kept: files are for inference", phase="save",
                hint="keep the model itself, and compile the training step where it runs",
            ) from error  # fmt: skip
        raise UnsupportedError(
            f"torch cannot export the program: {lines[0]}", phase="save",
            hint="export it yourself with torch.export, compile that, and save it",
        ) from error  # fmt: skip


def _free_dims(
    target: Callable[..., object], examples: Sequence[Example], naming: Naming
) -> dict[Place, object]:
    """The free dims, each with torch's name for it; dims of one name are one size."""
    last = examples[-1]
    numbered = pytree.tree_unflatten(list(range(len(last.leaves))), last.spec)
    given = by_name(target, *numbered)
    named: dict[str, object] = {}
    found: dict[Place, object] = {}
    for d in naming.dims:
        leaf = given[d.input]
        like = last.leaves[leaf] if isinstance(leaf, int) else None
        if not isinstance(leaf, int) or not isinstance(like, TensorLike):
            raise InputError(f"dims names {d.input!r}, which is no tensor", phase="save")
        place = d.place + len(like.shape) if d.place < 0 else d.place
        found[leaf, place] = named.setdefault(d.name, _dim(d))
    for other in examples[:-1]:
        if other.spec != last.spec:
            continue
        for k, (a, b) in enumerate(zip(other.sizes(), last.sizes(), strict=True)):
            for place, (m, n) in enumerate(zip(a, b, strict=False)) if a and b and len(a) == len(b) else ():
                if m != n:
                    found.setdefault((k, place), torch.export.Dim.AUTO)
    return found


def _dim(d: Dim) -> object:
    name = (
        d.name if d.name.isidentifier() and not keyword.iskeyword(d.name) else f"dim_{d.name.encode().hex()}"
    )
    return torch.export.Dim(name, min=d.low, max=d.high)


def _by_parameter(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """What stands for each argument, by the names of `forward`."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return dict(bound)


def parameters_of(target: Callable[..., object], count: int) -> tuple[str, ...]:
    """The names of the first parameters, by which arguments may be given; none for builtins."""
    call = target.forward if isinstance(target, nn.Module) else target
    try:
        found = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(p.name for p in found if p.kind in kinds)[:count]
