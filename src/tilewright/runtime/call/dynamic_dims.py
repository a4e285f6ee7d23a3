"""Named dynamic dims: which sizes of which inputs may change, and in which range; and what the inputs of a call are
like."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, UnknownKeyword, near_match

DimsLike = Mapping[str, Mapping[int, str | tuple[str, int, int]]]

_HINT = '{"x": {0: "batch"}}, or {"x": {0: ("batch", 1, 64)}} with the least and the largest size'


@dataclass(frozen=True, slots=True)
class Dim:
    """Dim `place` of input `input` is called `name` and lies in [low, high] (None: no bound)."""

    input: str
    place: int
    name: str
    low: int | None = None
    high: int | None = None


class Naming:
    """The dynamic dims of a model. Equal names mean equal sizes."""

    def __init__(self, dims: DimsLike | None = None) -> None:
        """Raises InputError for an entry that is no name and no (name, low, high)."""
        self.dims: list[Dim] = []
        for name, entries in (dims or {}).items():
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"dims names {name!r}, inputs have names", phase="input", hint=_HINT)
            if not isinstance(entries, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"dims of {name!r} cannot be {entries!r}", phase="input", hint=_HINT)
            for place, what in entries.items():
                match what:
                    case str():
                        self.dims.append(Dim(name, int(place), what))
                    case (str(), int(low), int(high)) if low <= high:
                        self.dims.append(Dim(name, int(place), *what))
                    case _:
                        raise InputError(
                            f"dim {place} of {name!r} cannot be {what!r}",
                            phase="input",
                            hint=_HINT,
                        )

    def __bool__(self) -> bool:
        return bool(self.dims)

    def place_of(self, given: Mapping[str, object]) -> Iterator[tuple[Dim, Tensor, int]]:
        """Each dim with its tensor and its non-negative position. Raises InputError for an unknown input, a wrong rank,
        a size out of range, or unequal sizes of one name."""
        sizes: dict[str, tuple[int, str]] = {}
        for d in self.dims:
            if d.input not in given:
                hint = near_match(d.input, given, "the inputs")
                raise InputError(f"dims names {d.input!r}, which is no input", phase="input", hint=hint)
            t = given[d.input]
            if not isinstance(t, Tensor):
                raise InputError(
                    f"dims names {d.input!r}, which is no tensor", phase="input", place=f"input {d.input}",
                    hint="name dims of tensors",
                )  # fmt: skip
            place = d.place + t.dim() if d.place < 0 else d.place
            if not 0 <= place < t.dim():
                raise InputError(
                    f"{d.input!r} has no dim {d.place}", phase="input", place=f"input {d.input}",
                    hint=f"it has {t.dim()} dims, counted from 0",
                )  # fmt: skip
            size = t.shape[place]
            self._check(d, size, sizes)
            yield d, t, place

    def _check(self, d: Dim, size: int, sizes: dict[str, tuple[int, str]]) -> None:
        where = f"dim {d.place} of input {d.input}"
        if (d.low is not None and size < d.low) or (d.high is not None and size > d.high):
            raise InputError(
                f"{d.name} is {size}, outside its range {d.low} .. {d.high}", phase="input", place=where,
                hint="give it a wider range where it is compiled (`dims=`, `--dim`)",
            )  # fmt: skip
        first, place = sizes.setdefault(d.name, (size, where))
        if first != size:
            raise InputError(f"{d.name} is {first} at {place} and {size} here", phase="input", place=where)


def by_name(
    target: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Arguments by parameter name (by number, `arg0` and so on, for builtins, which tell no names). Raises InputError
    where they do not fit the signature."""
    forward = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        inspect.signature(forward)
    except ValueError:
        return {**{f"arg{k}": a for k, a in enumerate(args)}, **kwargs}
    try:
        return dict(inspect.signature(forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        parameters = inspect.signature(forward).parameters
        unknown = next((name for name in kwargs if name not in parameters), None)
        if unknown is not None:
            raise UnknownKeyword(
                f"the arguments do not fit: {error}, and there is no input {unknown!r}",
                phase="input",
                hint=near_match(unknown, parameters, "the inputs"),
            ) from error
        raise InputError(
            f"the arguments do not fit: {error}", phase="input", hint=f"it takes {inspect.signature(forward)}"
        ) from error


@contextmanager
def mark_dynamic(places: Iterable[tuple[Dim, Tensor, int]], oblivious: bool = False) -> Generator[None]:
    """Inside, dims of the caller's tensors are marked as dynamic; outside, the tensors are as they were: marks that
    stay would rule whatever else is compiled for them. Sizes 0 and 1 have graphs of their own unless `oblivious`:
    torch refuses a range for what it takes as a constant."""
    before: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
    try:
        for d, t, place in places:
            before.setdefault(id(t), (vars(t), {name: copy.copy(held) for name, held in vars(t).items()}))
            if d.low is None or oblivious or t.shape[place] > 1:
                torch._dynamo.mark_dynamic(t, place, min=d.low, max=d.high)
        yield
    finally:
        for held, old in before.values():
            for name in [n for n in held if n not in old]:
                del held[name]
            held |= old


# --- forms of calls ---


@dataclass(frozen=True, slots=True)
class TensorLike:
    """What an example of a tensor must be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor like this one; dense if it is of another shape."""
        if shape is None or tuple(shape) == self.shape:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()
        return torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Example:
    """Flat arguments, tensors among them as what they are like, and how they nest."""

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec

    def sizes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each flat argument that is a tensor."""
        return tuple(x.shape if isinstance(x, TensorLike) else None for x in self.leaves)

    def is_like(self, other: Example) -> bool:
        """Whether arguments nest so and are like these. What equality says of other objects, or may not say (those
        that hold tensors), is not asked: they are like all of their type."""
        return self.spec == other.spec and all(map(_are_alike, self.leaves, other.leaves))


_COMPARED = (TensorLike, bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _are_alike(a: object, b: object) -> bool:
    return type(a) is type(b) and (a == b if isinstance(a, _COMPARED) else True)


def example_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Example:
    """The form of a call."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return Example(tuple(_like(x) for x in leaves), spec)


def _like(x: object) -> object:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return x
    return TensorLike(tuple(x.shape), x.stride(), x.dtype, x.device)
