"""At which sizes a verb works: one rule for all verbs, and every verb prints what it gave.

Files of arrays count first, then `--shape`, then the example inputs of a function, then the sizes that a file declares.
What a file leaves free is ours to choose: sizes that are typical, which the model must take."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright import errors
from tilewright.errors import InputError, TilewrightError
from tilewright.tuning.input_limits import EXAMPLES
from tilewright.tuning.text_limits import TEXTS

from .model import Model, parse_dtype, parse_pairs, parse_shape, read_array
from .request import CommandRequest

FreeDim = tuple[str, int | None]
"""A dim by its name, or one of an input by that and its number."""

Sizes = Mapping[FreeDim, int]
DimRange = tuple[str, int, int] | str


@dataclass(frozen=True, slots=True)
class Chosen:
    """Inputs by position, and who chose their sizes."""

    inputs: tuple[Tensor, ...]
    text: str
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Asking:
    """What was asked of inputs, read."""

    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    ranges: Mapping[str, Mapping[int, DimRange]]
    seed: int

    @staticmethod
    def of(request: CommandRequest, model: Model) -> Asking:
        """Read a request. Raises InputError for what cannot be read, and names that no input has."""
        files = parse_pairs(request.files, "--input", "=@")
        shapes = {n: parse_shape(text) for n, text in parse_pairs(request.shapes, "--shape").items()}
        dtypes: dict[str, torch.dtype] = {}
        for text in request.dtypes:
            name, sign, kind = text.rpartition("=")
            named = (name,) if sign else model.names
            dtypes |= {n: parse_dtype(kind) for n in named}
        ranges = dims_of(request)
        for name in (*files, *shapes, *dtypes, *ranges):
            if name not in model.names:
                hint = f"the inputs are {', '.join(model.names)}"
                raise InputError(f"no input is called {name!r}", phase="cli", op=model.name, hint=hint)
        return Asking(files, shapes, dtypes, ranges, request.seed)


_DIM = re.compile(
    r"(?P<input>.+):(?P<place>-?\d+)=(?P<name>[A-Za-z_]\w*)(\[(?P<low>\d+)\.\.(?P<high>\d+)\])?"
)


def dims_of(request: CommandRequest) -> dict[str, dict[int, DimRange]]:
    """The `--dim` of a request as `tilewright.compile` takes them. Raises InputError."""
    found: dict[str, dict[int, DimRange]] = {}
    for text in request.dims:
        read = _DIM.fullmatch(text)
        if read is None or (read["low"] and int(read["low"]) > int(read["high"])):
            raise InputError(f"not a dim: {text!r}", phase="cli", hint="write x:0=batch or x:0=batch[1..64]")
        name = read["name"]
        entry = (name, int(read["low"]), int(read["high"])) if read["low"] else name
        found.setdefault(read["input"], {})[int(read["place"])] = entry
    return found


@dataclass(frozen=True, slots=True)
class SizesOfDim:
    """Sizes that a named dim takes one after the other."""

    dim: str
    sizes: tuple[int, ...]

    def check(self, request: CommandRequest, model: Model) -> None:
        """Raise InputError unless an input has the dim."""
        if not self._places(request, model):
            hint = f"name it: --dim {model.names[0] if model.names else 'x'}:0={self.dim}"
            raise InputError(f"no input has a dim {self.dim!r}", phase="cli", op="--over", hint=hint)

    def inputs(
        self, request: CommandRequest, model: Model, inputs: Sequence[Tensor], number: int
    ) -> tuple[Tensor, ...]:
        """Inputs where the dim is `number`; random ones in place of those that have it."""
        places = self._places(request, model)
        generator = torch.Generator().manual_seed(request.seed)
        found: list[Tensor] = []
        for name, x in zip(model.names, inputs, strict=True):
            shape = tuple(number if k in places.get(name, ()) else n for k, n in enumerate(x.shape))
            made = x if name not in places else random_tensor(shape, x.dtype, generator).to(x.device)
            found.append(made)
        return tuple(found)

    def _places(self, request: CommandRequest, model: Model) -> dict[str, set[int]]:
        """The dims of inputs that have the name: as asked for, or as a file declares."""
        found: dict[str, set[int]] = {}
        for name, ranges in dims_of(request).items():
            for k, entry in ranges.items():
                if (entry if isinstance(entry, str) else entry[0]) == self.dim:
                    found.setdefault(name, set()).add(k)
        for spec in model.declared:
            for k, size in enumerate(spec.dims or ()):
                if size == self.dim:
                    found.setdefault(spec.name, set()).add(k)
        return found


def parse_over(text: str) -> SizesOfDim:
    """`batch=1,2,4`. Raises InputError."""
    name, sign, numbers = text.partition("=")
    sizes = [int(n) for n in numbers.split(",") if n.strip().isascii() and n.strip().isdecimal()]
    if not sign or not name or len(sizes) != len(numbers.split(",")) or 0 in sizes:
        raise InputError(
            f"not sizes of a dim: {text!r}", phase="cli", op="--over", hint="write batch=1,2,4,8"
        )
    return SizesOfDim(name, tuple(sorted(set(sizes))))


def choose(request: CommandRequest, model: Model) -> Chosen:
    """Inputs for a model. Raises InputError where none that we choose fit, naming all of them, and sizes that do."""
    asked = Asking.of(request, model)
    free = _free_dims(model, asked)
    if not free:
        inputs = _made(model, asked, {})
        return Chosen(inputs, _source(model, asked))
    tried: list[tuple[str, str]] = []
    for sizes in _typical(model, asked, free):
        inputs = _made(model, asked, sizes)
        refused = _refusal(model, inputs)
        if refused is None:
            return Chosen(inputs, "chosen; --shape takes others", ours=True)
        tried.append((shown(model, inputs), refused))
    raise _no_sizes_fit(model, asked, free, tried)


def shown(model: Model, inputs: Sequence[Tensor]) -> str:
    """Sizes as `--shape` takes them: `x=2x64 y=2`; of long names the beginning and end."""
    texts = ("x".join(map(str, t.shape)) or "scalar" for t in inputs)
    names = (errors.shown(name, TEXTS.max_name_characters) for name in model.names)
    return " ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))


def _source(model: Model, asked: Asking) -> str:
    if asked.files or asked.shapes:
        return "given"
    return "the example inputs" if model.inputs is not None else "declared by the file"


def _free_dims(model: Model, asked: Asking) -> dict[FreeDim, tuple[str, int]]:
    """Sizes that nobody gave, each with the first input and dim that has it. A name that a given shape fixes is fixed
    for all inputs."""
    if model.inputs is not None:
        return {}
    known = set(_given(model, asked))
    found: dict[FreeDim, tuple[str, int]] = {}
    for spec in model.declared:
        if spec.name in asked.files or spec.name in asked.shapes:
            continue
        if spec.dims is None or spec.dtype is None:
            what = "an unknown rank" if spec.dtype is not None else "no tensor type"
            hint = f"give --shape {spec.name}=... or --input {spec.name}=@FILE"
            raise InputError(f"input {spec.name!r} has {what}", phase="cli", op=model.name, hint=hint)
        for k, size in enumerate(spec.dims):
            if not isinstance(size, int) and (key := _key(spec.name, k, size)) not in known:
                found.setdefault(key, (spec.name, k))
    return found


def _key(name: str, k: int, size: str | None) -> FreeDim:
    return (size, None) if size is not None else (name, k)


def _given(model: Model, asked: Asking) -> dict[FreeDim, int]:
    """Sizes of named dims that given shapes and files fix."""
    found: dict[FreeDim, int] = {}
    for spec in model.declared:
        shape = asked.shapes.get(spec.name)
        if spec.name in asked.files:
            shape = tuple(read_array(asked.files[spec.name]).shape)
        for k, size in enumerate(spec.dims or ()):
            if shape is not None and k < len(shape) and isinstance(size, str):
                found.setdefault((size, None), shape[k])
    return found


def _typical(model: Model, asked: Asking, free: Mapping[FreeDim, tuple[str, int]]) -> Iterator[Sizes]:
    """Sizes for free dims, most typical first: one for leading dims, one for the others."""
    seen: list[Sizes] = []
    for first, rest in EXAMPLES.undeclared_sizes:
        sizes = {key: _within(asked, place, rest if place[1] else first) for key, place in free.items()}
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def _within(asked: Asking, place: tuple[str, int], size: int) -> int:
    entry = asked.ranges.get(place[0], {}).get(place[1])
    return size if entry is None or isinstance(entry, str) else max(entry[1], min(size, entry[2]))


def _made(model: Model, asked: Asking, sizes: Sizes) -> tuple[Tensor, ...]:
    """Inputs where free dims have these sizes."""
    sizes = {**_given(model, asked), **sizes}
    generator = torch.Generator().manual_seed(asked.seed)
    found: list[Tensor] = []
    for i, name in enumerate(model.names):
        example = None if model.inputs is None else model.inputs[i]
        if name in asked.files:
            found.append(read_array(asked.files[name]))
            continue
        if example is not None and name not in asked.shapes:
            found.append(example if name not in asked.dtypes else example.to(asked.dtypes[name]))
            continue
        declared = model.declared[i].dtype if example is None else example.dtype
        dtype = asked.dtypes.get(name, declared)
        if dtype is None:
            raise InputError("not a tensor input", phase="cli", op=name, hint="use the Python API")
        shape = asked.shapes.get(name)
        if shape is None:
            spec = model.declared[i]
            shape = tuple(
                n if isinstance(n, int) else sizes[_key(name, k, n)] for k, n in enumerate(spec.dims or ())
            )
        found.append(random_tensor(shape, dtype, generator))
    return tuple(found)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal floats; integers and bools 0 or 1, which are valid wherever an index or a mask is meant."""
    if dtype.is_floating_point or dtype.is_complex:
        return _allocated(shape, lambda: torch.randn(shape, generator=generator).to(dtype))
    return _allocated(shape, lambda: torch.randint(0, 2, shape, generator=generator).to(dtype))


def _allocated(shape: tuple[int, ...], make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes. Raises InputError where a tensor of that shape does not fit into memory."""
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        shown = "x".join(map(str, shape))
        raise InputError(
            f"an input of {shown} does not fit into memory",
            phase="cli",
            hint="give smaller sizes with --shape",
        ) from error


def _refusal(model: Model, inputs: tuple[Tensor, ...]) -> str | None:
    """What the model says against inputs when torch runs it; None: nothing."""
    try:
        with torch.no_grad():
            model.eager(*inputs)
    except TilewrightError as error:
        return error.message
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def _no_sizes_fit(
    model: Model, asked: Asking, free: Mapping[FreeDim, tuple[str, int]], tried: Sequence[tuple[str, str]]
) -> InputError:
    """The error, with sizes that fit if some are found."""
    texts = "; ".join(f"{sizes} ({why})" for sizes, why in tried)
    found = _search(model, asked, free)
    if found is None:
        ask = " ".join(f"--shape {name}=..." for name in model.names if name not in asked.files)
        hint = f"say which sizes it takes: {ask}"
    else:
        fits = " ".join(f"--shape {text}" for text in shown(model, found).split())
        hint = f"these fit: {fits}"
    return InputError(
        f"the sizes that we chose do not fit the model: {texts}", phase="cli", op=model.name, hint=hint
    )


def _search(
    model: Model, asked: Asking, free: Mapping[FreeDim, tuple[str, int]]
) -> tuple[Tensor, ...] | None:
    """Inputs that the model takes: leading dims of one size and others of another, then one dim apart."""
    end = time.monotonic() + EXAMPLES.max_search_seconds

    def candidates() -> Iterator[Sizes]:
        for first in EXAMPLES.leading_sizes:
            for rest in EXAMPLES.other_sizes:
                yield {key: rest if place[1] else first for key, place in free.items()}
        for one in free:
            for base in EXAMPLES.undeclared_sizes:
                for size in EXAMPLES.other_sizes:
                    usual = {key: base[1] if place[1] else base[0] for key, place in free.items()}
                    yield {**usual, one: size}

    for sizes in candidates():
        if time.monotonic() > end:
            return None
        inside = {key: _within(asked, free[key], size) for key, size in sizes.items()}
        inputs = _made(model, asked, inside)
        if _refusal(model, inputs) is None:
            return inputs
    return None
