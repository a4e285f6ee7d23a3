"""Arrays of numpy as tensors and back, element types of ml_dtypes (bfloat16, float8) included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import InputError

_PLAIN: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip

_EXTENDED: Mapping[torch.dtype, type[np.generic]] = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}
_BY_NAME = {np.dtype(kind).name: dtype for dtype, kind in _EXTENDED.items()}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.uint16)}


def tensor_of_array(array: np.ndarray, place: str = "") -> Tensor:
    """The tensor of the same shape and values. It shares memory where torch can view the array as it is; read-only or
    unaligned arrays and those with negative strides or another byte order are copied.

    Raises InputError (at `place`) for masked arrays and for element types that no tensor has: text, objects, dates,
    records, types below one byte.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            "an array with a mask is no tensor", phase="input", place=place, hint="pass array.filled(...)"
        )
    name = array.dtype.name
    dtype = _BY_NAME.get(name) or _PLAIN.get(name)
    if dtype is None:
        raise InputError(
            f"numpy dtype {name} has no torch dtype", phase="input", place=place,
            hint="pass an array of numbers: array.astype(np.float32), say",
        )  # fmt: skip
    if dtype in _EXTENDED:
        bits, carrier = _BITS[dtype.itemsize]
        return torch.from_numpy(_viewable(array.view(bits), carrier)).view(dtype)
    return torch.from_numpy(_viewable(array, dtype))


def _viewable(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The array, or a copy if torch could not share its memory."""
    plain = np.dtype(str(dtype).removeprefix("torch."))
    fits = (
        array.dtype.char == plain.char
        and array.dtype.isnative
        and array.flags.writeable
        and array.flags.aligned
        and all(s >= 0 and s % plain.itemsize == 0 for s in array.strides)
    )
    if fits:
        return array
    made = np.empty(array.shape, plain)
    made[...] = array
    return made


def array_of_tensor(tensor: Tensor) -> np.ndarray:
    """The array of the same shape and values; it shares a CPU tensor's memory. bfloat16 and float8 become ml_dtypes'.

    Raises InputError for a tensor whose elements numpy has no type for, and for sparse or nested ones."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    extended = _EXTENDED.get(plain.dtype)
    if extended is not None:
        return plain.view(_BITS[plain.dtype.itemsize][1]).numpy().view(extended)
    try:
        return plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"numpy has no array for a tensor of {tensor.dtype} and layout {tensor.layout}", phase="input",
            hint="pass tensors, and tensors come back",
        ) from error  # fmt: skip


def as_arrays(value: object) -> object:
    """`value` with its tensors, however nested, as arrays."""
    return pytree.tree_map_only(Tensor, array_of_tensor, value)


def only_arrays(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call brings arrays of numpy and no tensor, so that its results are arrays too."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return any(isinstance(x, np.ndarray) for x in leaves) and not any(isinstance(x, Tensor) for x in leaves)
