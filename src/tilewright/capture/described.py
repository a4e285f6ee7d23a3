"""What a captured program takes and gives: names, element types, shapes, and where each free size is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output. `shape` has numbers, names of free sizes, and formulas of these; None: not known."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        kind = "nested" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {kind}[{', '.join(map(str, self.shape)) if self.shape is not None else '...'}]"


@dataclass(frozen=True, slots=True)
class FreeSize:
    """A size that may change from call to call. `symbol` is its name in kernels and plans, `name` the user's (or the
    same), `places` the inputs and dims that have it; it lies in [low, high] (None: no bound)."""

    symbol: str
    name: str
    places: tuple[tuple[str, int], ...] = ()
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        places = ", ".join(f"{name}:{dim}" for name, dim in self.places)
        low = 0 if self.low is None else self.low
        return f"{self.name} = {places or 'a size of the data'} [{low}..{'' if self.high is None else self.high}]"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a program takes and gives, and its free sizes."""

    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    sizes: tuple[FreeSize, ...] = field(default=())

    def named(self, name_of: Callable[[str, int], str | None]) -> Signature:
        """With the user's names of dims, by input and position, in place of torch's symbols."""
        sizes = tuple(replace(s, name=_users_name(s, name_of)) for s in self.sizes)
        new = {s.symbol: s.name for s in sizes}

        def renamed(info: TensorInfo) -> TensorInfo:
            shape = info.shape and tuple(n if isinstance(n, int) else _replaced(n, new) for n in info.shape)
            return replace(info, shape=shape)

        return Signature(tuple(map(renamed, self.inputs)), tuple(map(renamed, self.outputs)), sizes)


def _users_name(size: FreeSize, name_of: Callable[[str, int], str | None]) -> str:
    return next((found for place in size.places if (found := name_of(*place))), size.name)


def _replaced(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), text)
