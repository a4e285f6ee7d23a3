"""Tensors as sections: their elements as they lie in memory, with type, shape and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.artifact.file.container import Container, Parts, SectionKind
from tilewright.artifact.file.strict_json import damaged
from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import DTYPES
from tilewright.ir.text.values import Json
from tilewright.runtime.call.kept_weights import NamedWeight
from tilewright.runtime.plan.tensors import torch_dtype
from tilewright.tuning.input_limits import ARTIFACTS, MODEL_FILES

_TYPES = {name: torch_dtype(t) for name, t in DTYPES.items()}
_NAMES = {t: name for name, t in _TYPES.items()}


class TensorWriter:
    """The table of tensors of a file that is written."""

    def __init__(self, parts: Parts) -> None:
        self.rows: list[Json] = []
        self._parts = parts
        self._places: dict[tuple[object, ...], int] = {}
        self._kept: list[Tensor] = []

    def place(self, t: Tensor, what: str) -> int:
        """The row of a tensor. Raises UnsupportedError for one whose elements are not plain memory."""
        plain = type(t) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and t.layout is torch.strided
        if not plain or t.dtype not in _NAMES or t.is_quantized:
            raise UnsupportedError(
                f"{what} is a tensor that an artifact cannot hold ({type(t).__name__}, {t.layout}, {t.dtype})",
                phase="save", op=what, hint="make it a plain tensor first",
            )  # fmt: skip
        t, span, key = _keyed(t)
        known = self._places.get(key)
        if known is not None:
            return known
        flat = t.as_strided((span,), (1,), t.storage_offset()).view(torch.uint8)
        self._kept.append(flat)  # its address is a key
        form = (_NAMES[t.dtype], tuple(t.shape)) if t.is_contiguous() else None
        section = self._parts.add(SectionKind.TENSOR, f"t{len(self.rows)}", flat.numpy().data, form)
        self.rows.append([section, _NAMES[t.dtype], list(t.shape), list(t.stride())])
        self._places[key] = len(self.rows) - 1
        return len(self.rows) - 1

    def known(self, t: Tensor) -> int | None:
        """The row of a tensor that has one."""
        plain = isinstance(t, Tensor) and t.layout is torch.strided and not t.is_quantized  # pyright: ignore[reportUnnecessaryIsInstance]
        return self._places.get(_keyed(t)[2]) if plain else None


def _keyed(t: Tensor) -> tuple[Tensor, int, tuple[object, ...]]:
    """A tensor as it is kept, its elements from the first to the last, and what tells it from others."""
    t = t.detach().resolve_neg().resolve_conj().cpu()
    span = _span(t.shape, t.stride())
    form = (t.dtype, tuple(t.shape), t.stride())
    return t, span, (t.data_ptr(), *form) if span else form


class TensorReader:
    """The table of tensors of a file that is read; each is made when it is asked for, always the same."""

    def __init__(self, container: Container, rows: Json, device: torch.device | None = None) -> None:
        """`device`: where they are brought; None: they stay on the CPU, in the memory of the file."""
        self._container = container
        self.device = device
        self._place = f"{container.place}, section tensors"
        if not isinstance(rows, (list, tuple)):
            raise damaged("its table of tensors is none", self._place)
        self._rows: Sequence[Json] = rows
        self._made: dict[int, Tensor] = {}
        self._owned: dict[int, Tensor] = {}

    def __getitem__(self, k: object) -> Tensor:
        if type(k) is not int or not 0 <= k < len(self._rows):
            raise damaged(f"it has no tensor {str(k)[:40]}", self._place)
        if k not in self._made:
            self._made[k] = self._read(self._rows[k])
        return self._made[k]

    def own(self, k: object) -> Tensor:
        """A copy that the program may write to, always the same. Raises ArtifactError where elements share memory:
        nothing can write to such a tensor, and a copy may take any memory."""
        t = self[k]
        assert type(k) is int
        if spread_bytes(t):
            raise damaged(f"tensor {k} is written to, and elements of it share memory", self._place)
        if k not in self._owned:
            self._owned[k] = t.clone(memory_format=torch.preserve_format)
        return self._owned[k]

    def _read(self, row: Json) -> Tensor:
        match row:
            case [str(section), str(kind), [*shape], [*strides]] if kind in _TYPES:
                sizes, steps = _numbers(shape), _numbers(strides)
                data = self._container.tensor(section, SectionKind.TENSOR)
                if (
                    sizes is None
                    or steps is None
                    or len(sizes) != len(steps)
                    or len(sizes) > ARTIFACTS.max_rank
                ):
                    raise damaged(f"tensor {section} has no such shape", self._place)
                count, span, dtype = 1, _span(sizes, steps), _TYPES[kind]
                for n in sizes:
                    count *= n
                if span * dtype.itemsize != data.numel() or count > MODEL_FILES.max_tensor_elements:
                    raise damaged(
                        f"tensor {section} has {data.numel()} bytes, which is not its shape", self._place
                    )
                made = data.view(dtype).as_strided(sizes, steps)
                return made if self.device is None else _elsewhere(made, self.device)
            case _:
                raise damaged(f"there is no such tensor: {str(row)[:80]}", self._place)


def _elsewhere(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device, with the same strides: its memory is copied, whatever it holds twice."""
    memory = t.as_strided((_span(t.shape, t.stride()),), (1,)).to(device)
    return memory.as_strided(t.shape, t.stride())


def spread_bytes(t: Tensor) -> int:
    """By how many bytes a dense copy is larger than the memory of a tensor."""
    return max(0, t.nbytes - t.untyped_storage().nbytes())


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _numbers(given: Sequence[Json]) -> list[int] | None:
    """Sizes or strides; None unless all are."""
    found = [n for n in given if type(n) is int and 0 <= n <= MODEL_FILES.max_shape_product]
    return found if len(found) == len(given) else None


def read_weights(told: Json, tensors: TensorReader, place: str) -> tuple[NamedWeight, ...]:
    """The tensors that a program holds, by their names. Raises ArtifactError for other data."""
    found: dict[str, NamedWeight] = {}
    for row in told if isinstance(told, (list, tuple)) else [told]:
        match row:
            case [str(name), int(k), bool(is_parameter), bool(written)] if name and name not in found:
                t = tensors.own(k) if written else tensors[k]
                found[name] = NamedWeight(name, t, is_parameter, written)
            case _:
                raise damaged(f"there is no such weight: {str(row)[:80]}", place)
    return tuple(found.values())
