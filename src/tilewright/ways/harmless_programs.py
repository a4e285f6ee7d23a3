"""Whether the file of an exported program holds data alone: torch's loader runs code that it finds in one.

The loader unpickles weights, constants and sample inputs, loads compiled libraries, evaluates sizes and guards as
Python, calls whatever a node names below `torch`, and imports what the structure of arguments names. So nothing of a
file reaches it before each of these is known to be what `torch.export.save` writes of tensors and numbers. What is
known here is read by torch's own reader: another one could see another file in the same bytes."""

# Torch has no public name for the archive of a program.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import io
import json
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import sympy
import torch
from torch._export.serde.serialize import _SYM_OPS
from torch.export.pt2_archive._package import PT2ArchiveReader
from torch.utils._sympy import functions

from tilewright.capture.harmless.ops import names_no_file

from .harmless_texts import is_guard, is_name, is_size

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None


class Harmful(Exception):
    """A file that may hold more than data."""


_FORMAT = ("archive_format", "archive_version", "byteorder", "version", ".format_version")
_PLACES = ("models/", "data/weights/", "data/constants/", "data/sample_inputs/", "extra/", ".data/")
"""Where the records of a program lie. (Elsewhere lie compiled libraries.)"""
_CONFIGURATION = re.compile(r"data/(weights|constants)/.*_config\.json", re.DOTALL)
_OP = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
_PREDISPATCH = re.compile(
    r"torch\._functorch\.predispatch\.(_(add|remove)_batch_dim|_(vmap|jvp|grad)_(in|de)crement_nesting"
    r"|lazy_load_decompositions)"
)
_FUNCTIONS = frozenset(
    {
        "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Eq", "Ne", "Equality",
        "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan", "And", "Or", "Not", "Piecewise",
        "ExprCondPair", "floor", "ceiling", "Abs", "sqrt",
    }
    | {name for name, f in vars(functions).items() if isinstance(f, type) and issubclass(f, sympy.Function)}
)  # fmt: skip
"""What sizes are written with."""
_OF_SIZES = frozenset(
    {f"_operator.{f.__name__}" for f in _SYM_OPS if f.__module__ == "_operator"}
    | {f"torch.{f.__name__}" for f in _SYM_OPS if f.__module__ == "torch"}
    | {f"math.{f.__name__}" for f in _SYM_OPS if f.__module__ == "math"}
)
"""How a file names what computes sizes."""
_OF_PICKLES = re.compile(
    r"data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d+|\.data/\w+"
)
"""Records of what `torch.save` writes."""
_NAMING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"})
"""Steps of a pickle that name what they call elsewhere than beside themselves, or as old versions did."""
_STORAGE = re.compile(
    r"torch\.[A-Z]\w*Storage|torch\.storage\.(Untyped|Typed)Storage|torch\.[a-z]+\d+(_\w+)?|torch\.bool"
)
"""Types of what tensors lie in, and of their elements."""
_PICKLED = frozenset({
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.Size", "torch.device",
    "torch.serialization._get_layout", "collections.OrderedDict", "collections.defaultdict", "collections.Counter",
    "collections.deque", "__builtin__.list", "__builtin__.dict", "__builtin__.tuple", "__builtin__.set",
    "__builtin__.frozenset", "__builtin__.int", "__builtin__.long", "__builtin__.float", "__builtin__.bool",
    "__builtin__.complex", "__builtin__.slice", "__builtin__.str", "__builtin__.unicode",
})  # fmt: skip
"""What makes sample inputs."""
_FACTORIES = frozenset({"list", "dict", "tuple", "set", "int", "float"})


def check_archive(path: str) -> None:
    """Raise Harmful unless the file holds data alone, whatever else torch says of it later."""
    with PT2ArchiveReader(path) as archive, zipfile.ZipFile(path) as packed:
        names = archive.get_file_names()
        sizes = {i.filename.partition("/")[2]: i.file_size for i in packed.infolist()}
        _check_records(names, sum(sizes.values()), os.path.getsize(path))
        for name in names:
            if name.startswith("models/"):
                _check_model(_json(archive, name))
            elif _CONFIGURATION.fullmatch(name):
                _check_payloads(archive, name, sizes)
            elif name.startswith("data/sample_inputs/"):
                _check_plain(archive.read_bytes(name))


def _check_records(names: Sequence[str], held: int, size: int) -> None:
    """Records are known ones, each once, and not larger than the file: torch packs none."""
    if len(set(names)) < len(names):
        raise Harmful("two records have one name")
    if held > size:
        raise Harmful("its records are larger than the file")
    for name in names:
        if name not in _FORMAT and not name.startswith(_PLACES):
            raise Harmful(f"it holds {name}")
        if name.startswith(("data/weights/", "data/constants/")) and name.endswith(".pt"):
            raise Harmful(f"{name} is pickled, as earlier versions of torch did")


def _json(archive: PT2ArchiveReader, name: str) -> Json:
    try:
        return json.loads(archive.read_bytes(name))
    except (ValueError, RecursionError) as bad:
        raise Harmful(f"{name} is no JSON") from bad


def _check_payloads(archive: PT2ArchiveReader, name: str, sizes: Mapping[str, int]) -> None:
    """Tensors that are plain bytes, and take no more memory than these."""
    match _json(archive, name):
        case {"config": Mapping() as payloads}:
            pass
        case _:
            raise Harmful(f"{name} lists no tensors")
    folder = name[: name.rindex("/") + 1]
    prefixes = ("weight_", "tensor_")
    for key, payload in payloads.items():
        match payload:
            case {"use_pickle": False, "path_name": str(file), "tensor_meta": Mapping() as meta}:
                pass
            case _:
                raise Harmful(f"{key} is pickled")
        if not file.startswith(prefixes):
            raise Harmful(f"{key} is an object")
        empty = not sizes.get(folder + file, 0)
        if empty and not any(n == {"as_int": 0} for n in cast(Sequence[Json], meta.get("sizes") or ())):
            raise Harmful(f"{key} has elements, and no bytes")


def _check_plain(data: bytes) -> None:
    """What torch loads without looking for code; else it would look for some."""
    if not data:
        return
    try:
        made: object = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as bad:  # whatever the loader raises of data that it does not take
        if not _is_of_known_parts(data):
            raise Harmful("its sample inputs hold more than tensors and numbers") from bad
        return
    if not isinstance(made, (tuple, dict)):
        raise Harmful("its sample inputs are no arguments")


def _is_of_known_parts(data: bytes) -> bool:
    """Whether a pickle, as `torch.save` writes it, names nothing but makers of tensors and plain containers, however
    they are called. (Torch's loader of weights takes fewer containers.)"""
    try:
        archive = torch._C.PyTorchFileReader(io.BytesIO(data))
        if not all(map(_OF_PICKLES.fullmatch, archive.get_all_records())):
            return False
        steps = list(pickletools.genops(archive.get_record("data.pkl")))
    except (RuntimeError, ValueError, LookupError, ArithmeticError):  # no archive, or no pickle
        return False
    named = [str(told).replace(" ", ".") for step, told, _ in steps if step.name == "GLOBAL"]
    return {step.name for step, _, _ in steps}.isdisjoint(_NAMING) and all(
        name in _PICKLED or _STORAGE.fullmatch(name) for name in named
    )


def _check_model(model: Json) -> None:
    """A graph of ops of torch's, with sizes, guards and structures that are data."""
    for key, value in _items(model):
        check = _CHECKS.get(key)
        if check is not None:
            check(value)


def _items(found: Json) -> Iterator[tuple[str, Json]]:
    """All keys and values, at any depth."""
    left = [found]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield from part.items()
            left += part.values()
        elif isinstance(part, list):
            left += part


def _check_expression(text: Json) -> None:
    if not isinstance(text, str) or not is_size(text, _FUNCTIONS):
        raise Harmful(f"{text!r} is no size")


def _check_guards(texts: Json) -> None:
    for text in cast(Sequence[Json], texts):
        if not isinstance(text, str) or not is_guard(text):
            raise Harmful(f"{text!r} is no condition on sizes")


def _check_ranges(ranges: Json) -> None:
    for name in cast(Mapping[str, Json], ranges):
        if not is_name(name):
            raise Harmful(f"{name!r} is no size")


def _check_target(target: Json) -> None:
    """An op that this process has, and that takes no name of a file."""
    if not isinstance(target, str):
        raise Harmful("a node calls nothing")
    if target in _OF_SIZES or _PREDISPATCH.fullmatch(target):
        return
    named = _OP.fullmatch(target)
    if named is None:
        raise Harmful(f"it calls {target}")
    namespace, name, overload = named.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    op: object = packet if overload is None else getattr(packet, overload, None)
    known = isinstance(op, torch._ops.HigherOrderOperator) or (
        isinstance(op, torch._ops.OpOverload) and names_no_file(op)
    )
    if not known:
        raise Harmful(f"it calls {target}, which is not known here or may reach files")


def _check_structure(text: Json) -> None:
    """How arguments are nested: types that torch knows by name, and no others."""
    left: list[Json] = [text]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            made = part.get("default_factory_name"), part.get("default_factory_module")
            factory = made == (None, None) or (made[0] in _FACTORIES and made[1] == "builtins")
            if "__enum__" in part or not factory:
                raise Harmful("its arguments are of types that torch would import")
            left += part.values()
        elif isinstance(part, str):
            try:
                inner: Json = json.loads(part)
            except (ValueError, RecursionError):
                continue
            left += [inner] if isinstance(inner, (dict, list)) else []
        elif isinstance(part, Sequence):
            left += part


_CHECKS: Mapping[str, Callable[[Json], None]] = {
    "expr_str": _check_expression,
    "guards_code": _check_guards,
    "range_constraints": _check_ranges,
    "target": _check_target,
    "in_spec": _check_structure,
    "out_spec": _check_structure,
}
"""What is looked at by its key, wherever that stands."""
