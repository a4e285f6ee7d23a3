"""Whether a value is of an annotated type through and through, however deep: dataclasses by their own annotations."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Check = Callable[[object], bool]


def check_types(value: object, annotation: object) -> None:
    """Raise TypeError unless `value` is what `annotation` says. Functions and plain objects are taken as they are."""
    if not _check(annotation)(value):
        plain = isinstance(value, (str, int, float, type(None)))  # the text of others may be of any length
        raise TypeError(f"{str(value)[:80] if plain else type(value).__name__} is no {annotation}")


@cache
def _check(annotation: Any) -> Check:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        checks = [_check(p) for p in parts]
        return lambda x: any(c(x) for c in checks)
    if origin is Literal:
        return lambda x: any(x == p and type(x) is type(p) for p in parts)
    if origin is tuple:
        return _tuple(parts)
    if origin in (list, Sequence):
        of = _check(parts[0])
        kinds = list if origin is list else (list, tuple)
        return lambda x: isinstance(x, kinds) and all(map(of, x))
    if origin in (dict, Mapping):
        key, of = map(_check, parts)
        return lambda x: isinstance(x, Mapping) and all(key(k) and of(v) for k, v in x.items())
    if annotation is None or annotation is type(None):
        return lambda x: x is None
    if annotation is object or annotation is Any or not isinstance(annotation, type):
        return lambda x: True
    return _class(annotation)


def _tuple(parts: tuple[Any, ...]) -> Check:
    if len(parts) == 2 and parts[1] is Ellipsis:
        of = _check(parts[0])
        return lambda x: type(x) is tuple and all(map(of, x))
    each = [_check(p) for p in parts]
    return lambda x: (
        type(x) is tuple and len(x) == len(each) and all(c(v) for c, v in zip(each, x, strict=True))
    )


def _class(of: type) -> Check:
    if of is float:
        return lambda x: type(x) in (float, int)
    if of in (int, str, bool, bytes):
        return lambda x: type(x) is of
    if not dataclasses.is_dataclass(of):
        return lambda x: isinstance(x, of)
    checks: list[tuple[str, Check]] = []

    def whole(x: object) -> bool:
        if not isinstance(x, of):
            return False
        if not checks:  # a class may hold others of its kind
            hints = get_type_hints(of)
            checks.extend((f.name, _check(hints[f.name])) for f in dataclasses.fields(of))
        return all(c(getattr(x, name)) for name, c in checks)

    return whole
