"""The table of ONNX operators: (domain, name) to python functions over torch ops, by opset version.

The signature of a function is the operator's own: positional parameters are its inputs, keyword-only parameters
its attributes with the standard's defaults. Three keyword names are not attributes: `outputs` (how many outputs
the node names), `device` (where a tensor without tensor inputs is made), `opset` (the version in force).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeVar, Unpack

from tilewright.capture.onnx.values.run import Host, Value

OpFunction = Callable[..., "Value | tuple[Value, ...]"]
HostFunction = Callable[..., "Host | tuple[Host, ...] | None"]
ReadsData = Callable[[Mapping[str, object]], bool]
"""Whether an operator with these attributes reads data."""
_F = TypeVar("_F", bound=Callable[..., object])

EXTRAS = frozenset({"outputs", "device", "opset"})


@dataclass(frozen=True)
class OpDef:
    """One operator from one opset version on.

    host: input positions read as host values (sizes, axes, pads).
    scalar: positions at which a one-element value may be passed as a plain number.
    small: positions at which a constant of one element is passed as a host value.
    pure: same inputs give the same outputs (may be folded).
    names: keyword-only parameters of the function; attributes outside them are refused.
    gives_host: the result is a host value even for tensor inputs.
    view: the function takes inputs of any strides (see `order_strides`).
    reads_data: whether control flow inside the function depends on data, so that it cannot be exported; asked with
        the attributes that the node gives.
    required: attributes without a default; least, most: how many inputs (most None: any number).
    """

    domain: str
    name: str
    since: int
    function: OpFunction
    host: frozenset[int]
    scalar: frozenset[int]
    small: frozenset[int]
    pure: bool
    names: frozenset[str]
    gives_host: bool
    view: bool
    reads_data: ReadsData
    required: frozenset[str]
    least: int
    most: int | None


_OPS: dict[tuple[str, str], list[OpDef]] = {}
_HOST_OPS: dict[str, HostFunction] = {}


class Traits(TypedDict, total=False):
    """What `OpDef` says of an operator beside its signature, where it is not the usual."""

    host: tuple[int, ...]
    scalar: tuple[int, ...]
    small: tuple[int, ...]
    pure: bool
    gives_host: bool
    view: bool
    reads_data: bool | ReadsData


def op(name: str, *, since: int = 1, domain: str = "", **traits: Unpack[Traits]) -> Callable[[_F], _F]:
    """Enter the decorated function for operator `name` from opset `since` on."""

    def enter(function: _F) -> _F:
        parameters = list(inspect.signature(function).parameters.values())
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        reads = traits.get("reads_data", False)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        entry = OpDef(
            domain=domain,
            name=name,
            since=since,
            function=function,  # type: ignore[arg-type]
            host=frozenset(traits.get("host", ())),
            scalar=frozenset(traits.get("scalar", ())),
            small=frozenset(traits.get("small", ())),
            pure=traits.get("pure", True),
            names=frozenset(p.name for p in keywords),
            gives_host=traits.get("gives_host", False),
            view=traits.get("view", False),
            reads_data=reads if callable(reads) else lambda _: reads,
            required=frozenset(p.name for p in keywords if p.default is p.empty) - EXTRAS,
            least=sum(p.default is p.empty for p in places) + (1 if variadic else 0),
            most=None if variadic else len(places),
        )
        versions = _OPS.setdefault((domain, name), [])
        versions.append(entry)
        versions.sort(key=lambda e: e.since)
        return function

    return enter


def host_op(*names: str) -> Callable[[_F], _F]:
    """Enter the decorated function as the meaning of operators over host values only.

    It may return None: then the host cannot do this one and the tensor function is called.
    """

    def enter(function: _F) -> _F:
        for name in names:
            _HOST_OPS[name] = function  # type: ignore[assignment]
        return function

    return enter


def lookup(domain: str, name: str, version: int) -> OpDef | None:
    """The newest entry not newer than `version`, or None."""
    found: OpDef | None = None
    for entry in _OPS.get((domain, name), ()):
        if entry.since <= version:
            found = entry
    return found


def lookup_host(domain: str, name: str) -> HostFunction | None:
    """The host meaning of an operator of the standard domain, or None."""
    return None if domain else _HOST_OPS.get(name)


def known_operators() -> list[tuple[str, str]]:
    """All (domain, name) pairs of the table, sorted."""
    return sorted(_OPS)
