"""What a value of the compiler is, as a number: the key of everything that is remembered.

Every field counts. Dataclasses are walked field by field, so that a new field cannot be forgotten; a field that only
tells people something, or says where a value comes from, says so itself (`TOLD`). Two values have one identity only if
nothing that compiles them can tell them apart.

Objects that compare by identity (values, ops, kernels) are numbered where they first come up: graphs that differ only
in which objects they are made of are the same. What has no identity of its own (an object of a foreign class) is equal
to itself alone, in this process alone. Of a tensor its type and shape count: what it holds is data, not program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from typing import cast

import torch
from torch._ops import OpOverload

from tilewright.tuning.search_limits import EXPRESSIONS

from .expr import Expr, uncomputed

VERSION = "identity 1"
"""Part of every identity. Raised when what is written down here changes its meaning."""

_TOLD = "told"
TOLD: Mapping[str, object] = types.MappingProxyType({_TOLD: True})
"""The `metadata` of a field that is told to people, or says where a value comes from, and decides nothing."""

_LABEL = "label"
LABEL: Mapping[str, object] = types.MappingProxyType({_LABEL: True})
"""The `metadata` of a field of numbers that only say which objects belong together (negative: to none)."""


_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def identity(*values: object) -> str:
    """The identity of some values together, as hexadecimal digits."""
    walk = _Walk()
    for value in values:
        walk.parts(_parts_of(value))
    return walk.total.hexdigest()


def counted_fields(of: type) -> tuple[str, ...]:
    """The names of a dataclass's fields that are part of its identity."""
    return tuple(name for name, _ in _fields(of))


@dataclass(frozen=True, slots=True)
class _Object:
    """An object that stands for itself: told in full where it first comes up, by its number after."""

    of: object


@dataclass(frozen=True, slots=True)
class _Label:
    """A number of a field of that name, which only says what belongs together."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries that have no order, each the parts of a key and of a value. The first part of each key is an object."""

    pairs: tuple[tuple[_Parts, _Parts], ...]


_Part = bytes | _Object | _Label | _Entries
_Parts = tuple[_Part, ...]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=20).digest()


def _sized(tag: bytes, data: bytes) -> bytes:
    """Text that says where it ends, so that no two lists of texts run together."""
    return tag + len(data).to_bytes(4, "little") + data


class _Walk:
    """Hashes parts, and numbers the objects among them."""

    def __init__(self) -> None:
        self.total = hashlib.blake2b(VERSION.encode(), digest_size=20)
        self.numbers: dict[int, int] = {}
        self.labels: dict[tuple[str, int], int] = {}
        self.held: list[object] = []

    def parts(self, parts: _Parts) -> None:
        """The parts of one value."""
        for part in parts:
            if isinstance(part, bytes):
                self.total.update(part)
            elif isinstance(part, _Object):
                self.object(part.of)
            elif isinstance(part, _Label):
                self.label(part)
            else:
                self.entries(part)

    def object(self, x: object) -> None:
        """One that may have come up before."""
        number = self.numbers.get(id(x))
        if number is not None:
            self.total.update(b"#" + number.to_bytes(4, "little"))
            return
        self.numbers[id(x)] = len(self.numbers)
        self.held.append(x)
        self.total.update(b"!")
        self.parts(_remembered(x))

    def label(self, label: _Label) -> None:
        """The number of a label among those of its field."""
        key = label.name, label.number
        number = -1 if label.number < 0 else self.labels.setdefault(key, len(self.labels))
        self.total.update(b"@" + number.to_bytes(4, "little", signed=True))

    def entries(self, entries: _Entries) -> None:
        """Entries of objects that came up before by their numbers, then the others as they come."""
        last = len(self.numbers)

        def place(pair: tuple[_Parts, _Parts]) -> int:
            first = pair[0][0]
            return self.numbers.get(id(first.of), last) if isinstance(first, _Object) else last

        for key, value in sorted(entries.pairs, key=place):
            self.parts(key)
            self.parts(value)


_memo: dict[int, tuple[object, _Parts]] = {}


def _remembered(x: object) -> _Parts:
    """The parts of an object, which is kept alive with them; of too many, all are forgotten."""
    found = _memo.get(id(x))
    if found is not None:
        return found[1]
    collected = _Collected()
    collected.tell(x)
    parts = collected.finished()
    if collected.fixed:
        _remember(x, parts)
    return parts


def _remember(x: object, parts: _Parts) -> None:
    if len(_memo) >= EXPRESSIONS.memo_objects:
        _memo.clear()
    _memo[id(x)] = (x, parts)


def _parts_of(x: object) -> _Parts:
    collected = _Collected()
    if _is_dataclass(x):  # this one itself is not remembered: many kernels are only priced
        collected.tell(x)
    else:
        collected.add(x)
    return collected.finished()


def expr_identity(e: Expr) -> bytes:
    """The identity of one expression, which remembers it."""
    for x in uncomputed(e, lambda x: x.identity_memo is not None):
        own = _Collected()
        own.add((x.op, x.dtype, x.value))
        (data,) = own.finished()
        assert isinstance(data, bytes)
        x.identity_memo = _hash(data + b"".join(a.identity_memo or b"" for a in x.args))
    return e.identity_memo or b""


class _Collected:
    """Collects the parts of a value. `fixed` says whether they stay what they are."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.fixed = True

    def finished(self) -> _Parts:
        """The parts, texts that follow each other joined."""
        joined: list[_Part] = []
        texts: list[bytes] = []
        for part in self.parts:
            if isinstance(part, bytes):
                texts.append(part)
            else:
                joined += [b"".join(texts), part]
                texts = []
        joined += [b"".join(texts)] if texts else []
        return tuple(joined)

    def add(self, x: object) -> None:
        """Any value."""
        if isinstance(x, Expr):
            self.parts.append(b"e" + (x.identity_memo or expr_identity(x)))
        elif (plain := _plain(x)) is not None:
            self.parts.append(plain)
        elif _is_dataclass(x):
            self._dataclass(x)
        elif isinstance(x, (tuple, list)):
            self._sequence(cast("Sequence[object]", x))
        elif isinstance(x, (Mapping, Set)):
            self._unordered(cast("Mapping[object, object] | Set[object]", x))
        elif isinstance(x, types.FunctionType):
            self.parts.append(_Object(x))
        else:
            self._foreign(x)

    def tell(self, x: object) -> None:
        """A dataclass or function field by field, even if it stands for itself."""
        if isinstance(x, types.FunctionType):
            self._function(x)
            return
        fields = _fields(type(x))
        self.parts.append(_title(type(x)))
        for name, label in fields:
            held = getattr(x, name)
            if label:
                self.parts.append(_Label(name, held))
            else:
                self.add(held)

    def _dataclass(self, x: object) -> None:
        if _compares_by_identity(type(x)):
            self.parts.append(_Object(x))
            return
        parts = _memo.get(id(x), (None, ()))[1]
        if not parts:
            own = _Collected()
            own.tell(x)
            parts = own.finished()
            if len(parts) == 1 and isinstance(parts[0], bytes):
                parts = (b"d" + _hash(parts[0]),)
            if own.fixed:
                _remember(x, parts)
            self.fixed = self.fixed and own.fixed
        self.parts += parts

    def _sequence(self, x: Sequence[object]) -> None:
        self.fixed = self.fixed and isinstance(x, tuple)
        self.parts.append(_title(type(x)) + len(x).to_bytes(4, "little"))
        for item in x:
            self.add(item)

    def _unordered(self, x: Mapping[object, object] | Set[object]) -> None:
        """A mapping or a set: a list of entries, sorted but for objects, whose order only a walk can tell."""
        self.fixed = False
        of = x if isinstance(x, Mapping) else dict.fromkeys(x)
        self.parts.append((b"{" if isinstance(x, Mapping) else b"<") + len(of).to_bytes(4, "little"))
        plain: list[bytes] = []
        others: list[tuple[_Parts, _Parts]] = []
        for key, value in of.items():
            parts = tuple(_parts_inside(part) for part in (key, value))
            if all(isinstance(p, bytes) for p in parts[0] + parts[1]):
                plain.append(b"".join(cast("Iterable[bytes]", parts[0] + parts[1])))
            else:
                others.append((parts[0], parts[1]))
        self.parts += [*sorted(plain), _Entries(tuple(others))]

    def _foreign(self, x: object) -> None:
        """Code and tensors; what else there is, is equal to itself alone."""
        self.fixed = False
        if isinstance(x, torch.Tensor):
            form = x.dtype, tuple(x.shape), x.device, x.layout
            self.parts.append(_sized(b"t", "; ".join(map(str, form)).encode()))
        elif isinstance(x, OpOverload):
            self.parts.append(_sized(b"o", str(x).encode()))
        elif isinstance(x, partial):
            bound = cast("partial[object]", x)
            self.parts.append(b"p")
            self.add((bound.func, bound.args, bound.keywords))
        elif isinstance(x, types.MethodType):
            self.parts.append(b"m")
            self.add((x.__func__, x.__self__))
        elif isinstance(x, (type, types.BuiltinFunctionType)) and x.__module__:
            self.parts.append(_sized(b"n", f"{x.__module__}.{x.__qualname__}".encode()))
        else:
            self.parts.append(b"a" + _alone(x))

    def _function(self, x: types.FunctionType) -> None:
        """By its name, its code, and what it holds of the functions around it."""
        self.fixed = False
        held = tuple(map(_held, x.__closure__ or ()))
        self.add((x.__module__, x.__qualname__, *_code(x.__code__), x.__defaults__, x.__kwdefaults__, held))


def _parts_inside(x: object) -> _Parts:
    collected = _Collected()
    collected.add(x)
    return collected.finished()


def _is_dataclass(x: object) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


@lru_cache(None)
def _fields(of: type) -> tuple[tuple[str, bool], ...]:
    """The fields that count, and whether each is a label."""
    return tuple(
        (f.name, _LABEL in f.metadata)
        for f in dataclasses.fields(of)  # pyright: ignore[reportArgumentType]
        if _TOLD not in f.metadata
    )


@lru_cache(None)
def _title(of: type) -> bytes:
    return _sized(b"c", f"{of.__module__}.{of.__qualname__}".encode())


@lru_cache(None)
def _compares_by_identity(of: type) -> bool:
    return of.__eq__ is object.__eq__


def _held(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return types.CellType


def _code(code: types.CodeType) -> list[bytes]:
    """A function's text: its instructions and the constants and names in them."""
    parts = [code.co_code, repr(code.co_names).encode(), repr(code.co_freevars).encode()]
    for held in code.co_consts:
        parts += _code(held) if isinstance(held, types.CodeType) else [repr(held).encode()]
    return parts


def _plain(x: object) -> bytes | None:
    """Numbers, texts and names; their types count."""
    if x is None:
        return b"0"
    if isinstance(x, bool):
        return b"+" if x else b"-"
    if isinstance(x, Enum):
        return _title(type(x)) + _sized(b"v", f"{x.name} {x.value!r}".encode())
    if isinstance(x, str):
        return _sized(b"s", x.encode(errors="surrogatepass"))
    if isinstance(x, int):
        return _sized(b"i", str(int(x)).encode())
    if isinstance(x, float):
        return b"f" + struct.pack("<d", x)
    if isinstance(x, complex):
        return b"z" + struct.pack("<dd", x.real, x.imag)
    if isinstance(x, bytes):
        return _sized(b"b", x)
    if isinstance(x, Fraction):
        return _sized(b"q", str(x).encode())
    if isinstance(x, _PLAIN):
        return _title(type(x)) + _sized(b"v", str(x).encode())
    return None


_PROCESS = secrets.token_bytes(16)
_alone_numbers: dict[int, bytes] = {}


def _alone(x: object) -> bytes:
    """A name for an object that nothing else ever has."""
    found = _alone_numbers.get(id(x))
    if found is None:
        found = _PROCESS + secrets.token_bytes(16)
        forget: Callable[[int, object], object] = _alone_numbers.pop
        try:
            weakref.finalize(x, forget, id(x), None).atexit = False
        except TypeError:  # not even equal to itself
            return found
        _alone_numbers[id(x)] = found
    return found
