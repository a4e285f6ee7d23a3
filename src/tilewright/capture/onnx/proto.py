"""Reading ONNX files without trusting them: the model proto, tensors, data kept in other files."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper
from torch import Tensor

from tilewright.arrays import tensor_of_array
from tilewright.capture.onnx.values.run import torch_dtype
from tilewright.errors import ModelError, UnsupportedError
from tilewright.machine_memory import reachable_bytes
from tilewright.tuning.input_limits import MODEL_FILES

_EXTERNAL_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})


@dataclass(frozen=True)
class ModelSource:
    """A parsed model and the folder that its external data must lie in (None: none allowed)."""

    model: onnx.ModelProto
    folder: Path | None
    place: str


def read_model(path: str | os.PathLike[str] | onnx.ModelProto) -> ModelSource:
    """Parse a file (or take a proto) and check that it is an ONNX model with a graph.

    Raises ModelError when the file is missing, truncated or something else than a model, UnsupportedError for
    opsets before 7 or after the newest that the installed `onnx` knows.
    """
    if isinstance(path, onnx.ModelProto):
        source = ModelSource(path, None, "ModelProto")
    else:
        source = _parse(Path(os.fspath(path)))
    model = source.model
    if not model.HasField("graph") or not model.opset_import:
        raise _bad("not an ONNX model: no graph or no opset", source.place)
    if not model.graph.output:
        raise _bad("the graph has no outputs", source.place)
    _check_text(model, source.place)
    version = default_opset(model)
    newest = onnx.defs.onnx_opset_version()
    if not MODEL_FILES.min_opset <= version <= newest:
        raise UnsupportedError(
            f"opset {version} is outside {MODEL_FILES.min_opset} to {newest}",
            phase="capture",
            place=source.place,
            hint="convert the model with onnx.version_converter, or install a newer onnx",
        )
    return source


def _check_text(model: onnx.ModelProto, place: str) -> None:
    """ModelError when a name is not valid UTF-8 (protobuf then gives bytes instead of text)."""
    texts: list[object] = [t for entry in model.opset_import for t in (entry.domain,)]
    texts += [t for entry in model.metadata_props for t in (entry.key, entry.value)]
    nodes: list[onnx.NodeProto] = []
    graphs = [model.graph]
    for function in model.functions:
        texts += [function.name, function.domain, *function.input, *function.output, *function.attribute]
        texts += [entry.domain for entry in function.opset_import]
        nodes += function.node
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            texts += [item.name for item in (*graph.initializer, *graph.input, *graph.output)]
            texts += [d.dim_param for item in graph.input for d in item.type.tensor_type.shape.dim]
            nodes += graph.node
            continue
        node = nodes.pop()
        texts += [node.op_type, node.domain, node.name, *node.input, *node.output]
        for attribute in node.attribute:
            texts += [attribute.name, attribute.ref_attr_name]
            graphs += [attribute.g] if attribute.HasField("g") else []
            graphs += attribute.graphs
    if any(isinstance(text, bytes) for text in texts):
        raise _bad("a name is not valid UTF-8", place)


def default_opset(model: onnx.ModelProto) -> int:
    """Version of the standard operator set that the model imports (the oldest we take if none is named)."""
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return entry.version
    return MODEL_FILES.min_opset


def _parse(path: Path) -> ModelSource:
    place = str(path)
    data = _read_file(path, place)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise _bad("not an ONNX model, or a damaged one: it does not parse", place) from error
    return ModelSource(model, path.parent, place)


def _read_file(path: Path, place: str) -> bytes:
    """The bytes of a plain file that protobuf can hold. A pipe or a device would never end."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _bad(f"cannot read the file: {said}", place, "check the path") from error
    info = os.fstat(handle)
    plain = stat.S_ISREG(info.st_mode)
    if not plain or info.st_size > MODEL_FILES.max_model_bytes:
        os.close(handle)
        said = f"{info.st_size} bytes are more than a model file can have" if plain else "not a plain file"
        raise _bad(said, place, "give the path of an ONNX file; large weights belong into files beside it")
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _bad(message: str, place: str, hint: str = "is the file complete and an ONNX model?") -> ModelError:
    return ModelError(message, phase="capture", place=place, hint=hint)


NARROW: dict[int, tuple[int, torch.dtype]] = {
    TensorProto.INT4: (4, torch.int8),
    TensorProto.UINT4: (4, torch.uint8),
    TensorProto.INT2: (2, torch.int8),
    TensorProto.UINT2: (2, torch.uint8),
}
"""Integer types below one byte: bits, and the torch type that holds their values one to a byte."""


def _narrow_tensor(proto: TensorProto, folder: Path | None, place: str) -> Tensor:
    """Packed small integers, unpacked."""
    bits, dtype = NARROW[proto.data_type]
    count = math.prod(proto.dims)
    size = (count * bits + 7) // 8
    if proto.data_location == TensorProto.EXTERNAL:
        raw = _external(proto, folder, size, place)
    else:
        raw = proto.raw_data if proto.HasField("raw_data") else bytes(v & 0xFF for v in proto.int32_data)
    if len(raw) != size:
        raise _bad(f"{len(raw)} bytes for shape {list(proto.dims)} of {bits}-bit integers", place)
    packed = np.frombuffer(raw, np.uint8)
    fields = np.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)
    values = fields.reshape(-1)[:count].astype(np.int16)
    if dtype == torch.int8:
        values = values - ((values >> (bits - 1)) << bits)
    return torch.from_numpy(values).to(dtype).reshape(tuple(proto.dims))


def tensor_of(proto: TensorProto, folder: Path | None) -> Tensor:
    """A tensor with its own memory. ModelError when the data do not fit the declared shape and type.

    Integers of 2 and 4 bits come unpacked, one to a byte (see `NARROW`).
    """
    place = f"tensor {proto.name!r}"
    if proto.data_type in NARROW:
        _check_dims(proto.dims, place)
        return _narrow_tensor(proto, folder, place)
    dtype = torch_dtype(proto.data_type)
    dims = tuple(proto.dims)
    _check_dims(dims, place)
    count = math.prod(dims)
    if proto.data_location == TensorProto.EXTERNAL:
        raw: bytes | bytearray | None = _external(proto, folder, count * dtype.itemsize, place)
    else:
        raw = proto.raw_data if proto.HasField("raw_data") else None
    if raw is not None:
        if len(raw) != count * dtype.itemsize:
            raise _bad(f"{len(raw)} bytes for shape {list(dims)} of {dtype}", place)
        if count == 0:
            return torch.empty(dims, dtype=dtype)
        return torch.frombuffer(raw if isinstance(raw, bytearray) else bytearray(raw), dtype=dtype).reshape(
            dims
        )
    if count > 0 and count > _field_count(proto):
        raise _bad(f"{_field_count(proto)} elements for shape {list(dims)}", place)
    try:
        array = numpy_helper.to_array(proto)
    except (ValueError, TypeError, OverflowError) as error:
        raise _bad(f"inconsistent data: {error}", place) from error
    return tensor_of_array(np.array(array)).to(dtype)


def _room(length: int, place: str) -> bytearray:
    """Memory for so many bytes. Linux may promise what it does not have, and end the process when it is used."""
    try:
        if length <= (reachable_bytes() or length):
            return bytearray(length)
    except MemoryError:
        pass
    raise _bad(f"{length} bytes of external data do not fit into memory", place)


def _check_dims(dims: Sequence[int], place: str) -> None:
    if any(d < 0 for d in dims):
        raise _bad(f"negative size in {list(dims)}", place)
    if math.prod(max(d, 1) for d in dims) > MODEL_FILES.max_shape_product:
        raise _bad(f"a shape of {list(dims)} is too large", place)


def _field_count(proto: TensorProto) -> int:
    return max(
        len(proto.float_data),
        len(proto.int32_data),
        len(proto.int64_data),
        len(proto.double_data),
        len(proto.uint64_data),
    )


def _external(proto: TensorProto, folder: Path | None, size: int, place: str) -> bytearray:
    """The bytes of a tensor kept in another file.

    The name must be relative and stay inside the model's folder; the file must be a regular one, not a link of
    either kind, and hold the whole range.
    """
    fields: dict[str, str] = {}
    for entry in proto.external_data:
        if entry.key not in _EXTERNAL_KEYS:
            raise _bad(f"unknown external data key {entry.key!r}", place)
        fields[entry.key] = entry.value
    location = fields.get("location", "")
    if folder is None:
        raise _bad("external data without a folder", place, "load the model from its file")
    relative = PurePosixPath(location)
    unsafe = (
        not location
        or "\0" in location
        or "\\" in location
        or relative.is_absolute()
        or PureWindowsPath(location).drive
        or ".." in relative.parts
    )
    if unsafe:
        raise _bad(f"external data location {location!r} leaves the model's folder", place)
    try:
        offset, length = int(fields.get("offset", "0")), int(fields.get("length", str(size)))
    except ValueError as error:
        raise _bad("offset or length of external data is no integer", place) from error
    if offset < 0 or length != size:
        raise _bad(f"external data range {offset}+{length} for {size} bytes", place)
    return _read_range(folder, relative, offset, length, place)


def _read_range(folder: Path, relative: PurePosixPath, offset: int, length: int, place: str) -> bytearray:
    """Open each part of the path without following links, then read exactly one range."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    current = folder
    for part in relative.parts[:-1]:
        current = current / part
        if current.is_symlink():
            raise _bad(f"external data {str(relative)!r} goes through a symbolic link", place)
    try:
        handle = os.open(current / relative.parts[-1], flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise _bad(f"cannot open external data {str(relative)!r}: {error.strerror}", place) from error
    info = os.fstat(handle)
    if stat.S_ISDIR(info.st_mode):
        os.close(handle)
        raise _bad(f"external data {str(relative)!r} is a folder", place)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise _bad(f"external data {str(relative)!r} is not a plain file of its own", place)
        if offset + length > info.st_size:
            raise _bad(f"external data {str(relative)!r} ends before byte {offset + length}", place)
        file.seek(offset)
        data = _room(length, place)
        count = file.readinto(data)
    if count != length:
        raise _bad(f"external data {str(relative)!r} is shorter than declared", place)
    return data
