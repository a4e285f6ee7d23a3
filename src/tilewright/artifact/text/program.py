"""One graph of a compiled model as text: its plan, how calls reach it, and what it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tilewright.artifact.file.strict_json import damaged
from tilewright.capture.described import FreeSize, Signature, TensorInfo
from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Expr
from tilewright.ir.text.values import Json
from tilewright.plan.data import Plan
from tilewright.plan.verify import check_memory
from tilewright.runtime.plan.call_form import CallForm

from .calls import CallReader, CallWriter
from .check_plan import check_plan
from .routines import KeepLoop, Routines, no_loops
from .tensors import TensorReader, TensorWriter
from .trees import read_tree, write_tree


@dataclass(frozen=True, slots=True, eq=False)
class Interface:
    """What a call of a graph is: its form, the names of parameters that may be given by name (in the order of
    positions), its signature, and what must hold of its sizes."""

    form: CallForm
    parameters: tuple[str, ...]
    signature: Signature
    conditions: tuple[Expr, ...] = ()


# --- the interface -------------------------------------------------------------------------------


def write_interface(made: Interface, tensors: TensorWriter) -> Json:
    """An interface as JSON. Raises UnsupportedError for what nests in another way than a list can say."""
    form, writer = made.form, CallWriter(tensors)
    state = [t for _, t in form.given if t is not None]
    targets = [t for t in form.writes.values() if isinstance(t, Tensor)]
    _refuse_shared(targets, state)
    constants: list[Json] = []
    for k, value in form.constants.items():
        if not (value is None or type(value) in (bool, int, float, str)):
            raise UnsupportedError(
                f"an argument was a {type(value).__name__} when it was compiled", phase="save",
                hint="put it into the module, or pass a tensor or a number",
            )  # fmt: skip
        constants.append([k, writer.write(value)])
    return {
        "inputs": list(form.inputs),
        "given": [
            [leaf, None if t is None else tensors.place(t, form.inputs[0] if form.inputs else "a weight")]
            for leaf, t in form.given
        ],
        "takes": write_tree(form.in_spec, "the arguments"),
        "gives": write_tree(form.out_spec, "the result"),
        "writes": [
            [k, t if isinstance(t, int) else {"tensor": _index(state, t)}] for k, t in form.writes.items()
        ],
        "written": [[k, n] for k, n in form.written.items()],
        "constants": constants,
        "parameters": list(made.parameters),
        "signature": _write_signature(made.signature),
        "conditions": writer.write(made.conditions),
        "expressions": writer.rows,
    }


def _index(tensors: Sequence[Tensor], t: Tensor) -> int:
    return next(k for k, other in enumerate(tensors) if other is t)


def _refuse_shared(targets: Sequence[Tensor], state: Sequence[Tensor]) -> None:
    """Raise UnsupportedError where a tensor that the program writes to is memory of another one."""
    for t in targets:
        if not any(other is t for other in state):
            raise UnsupportedError(
                "the program writes to a tensor that it does not read", phase="save",
                hint="return what it writes",
            )  # fmt: skip
        sharing = [
            s
            for s in state
            if s is not t and s.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        ]
        if sharing and t.numel():
            raise UnsupportedError(
                "two tensors that the program holds share memory that it writes to", phase="save",
                hint="give each its own memory: t.clone()",
            )  # fmt: skip


def read_interface(told: Json, tensors: TensorReader, routines: Routines, place: str) -> Interface:
    """The interface that `write_interface` wrote. Raises ArtifactError for other data."""
    match told:
        case {
            "inputs": [*inputs], "given": [*given], "takes": takes, "gives": gives, "writes": [*writes],
            "written": [*written], "constants": [*constants], "parameters": [*parameters], "signature": signature,
            "conditions": conditions, "expressions": rows,
        } if len(told) == 11:  # fmt: skip
            pass
        case _:
            raise damaged("an interface has other parts", place)
    reader = CallReader(rows, tensors, routines, place)
    in_spec, out_spec = read_tree(takes, place), read_tree(gives, place)
    leaves = in_spec.num_leaves
    if len(inputs) != leaves:
        raise damaged(f"{leaves} arguments have {len(inputs)} names", place)
    pairs = [_pair(x, place) for x in given]
    held = [t for _, t in pairs if t is not None]
    targets = [
        t["tensor"] for _, t in (_two(x, place) for x in writes) if isinstance(t, Mapping) and "tensor" in t
    ]
    state = [tensors.own(t) if n in targets else tensors[t] for n, t in enumerate(held)]
    order = iter(state)
    arguments = tuple(
        (_number(k, leaves, place), None) if t is None else (None, next(order)) for k, t in pairs
    )
    form = CallForm(
        _texts(inputs, place),
        arguments,
        in_spec,
        out_spec,
        {
            _number(k, len(writes) + out_spec.num_leaves, place): _target(t, state, leaves, place)
            for k, t in (_two(x, place) for x in writes)
        },
        {
            _number(k, len(writes) + out_spec.num_leaves, place): _number(
                n, len(writes) + out_spec.num_leaves, place
            )
            for k, n in (_two(x, place) for x in written)
        },
        {
            _number(k, leaves, place): reader.read(v, None | bool | int | float | str)
            for k, v in (_two(x, place) for x in constants)
        },
    )
    if any(n not in form.writes or k in form.writes for k, n in form.written.items()):
        raise damaged("a result is written as another that is not", place)
    return Interface(
        form,
        _texts(parameters, place),
        _read_signature(signature, place),
        reader.read(conditions, tuple[Expr, ...]),
    )


def _two(x: Json, place: str) -> tuple[Json, Json]:
    match x:
        case [a, b]:
            return a, b
        case _:
            raise damaged(f"no pair: {str(x)[:80]}", place)


def _pair(x: Json, place: str) -> tuple[Json, Json]:
    a, b = _two(x, place)
    if (a is None) == (b is None):
        raise damaged("an argument of a graph is one of a call or a tensor", place)
    return a, b


def _number(x: Json, below: int, place: str) -> int:
    if type(x) is not int or not 0 <= x < below:
        raise damaged(f"{str(x)[:40]} is no number below {below}", place)
    return x


def _texts(x: Sequence[Json], place: str) -> tuple[str, ...]:
    if not all(isinstance(t, str) for t in x):
        raise damaged("a name is no text", place)
    return tuple(cast("Sequence[str]", x))


def _target(t: Json, state: Sequence[Tensor], leaves: int, place: str) -> Tensor | int:
    match t:
        case {"tensor": k}:
            return state[_number(k, len(state), place)]
        case _:
            return _number(t, leaves, place)


# --- the signature -------------------------------------------------------------------------------


def _write_signature(s: Signature) -> Json:
    sizes: list[Json] = [[f.symbol, f.name, [[n, d] for n, d in f.places], f.low, f.high] for f in s.sizes]
    return {
        "inputs": [_write_info(i) for i in s.inputs],
        "outputs": [_write_info(i) for i in s.outputs],
        "sizes": sizes,
    }


def _write_info(i: TensorInfo) -> Json:
    return [
        i.name,
        None if i.dtype is None else str(i.dtype).removeprefix("torch."),
        None if i.shape is None else list(i.shape),
    ]


def _read_signature(told: Json, place: str) -> Signature:
    match told:
        case {"inputs": [*inputs], "outputs": [*outputs], "sizes": [*sizes]}:
            return Signature(
                tuple(_read_info(i, place) for i in inputs), tuple(_read_info(i, place) for i in outputs),
                tuple(_read_size(s, place) for s in sizes),
            )  # fmt: skip
        case _:
            raise damaged("a signature has other parts", place)


def _read_info(told: Json, place: str) -> TensorInfo:
    match told:
        case [str(name), None | str() as kind, None as shape] | [str(name), None | str() as kind, [*shape]]:
            dtype = None if kind is None else getattr(torch, kind, None)
            if (dtype is None or isinstance(dtype, torch.dtype)) and all(
                type(n) in (int, str) for n in shape or ()
            ):
                return TensorInfo(
                    name, dtype, None if shape is None else tuple(cast("list[int | str]", shape))
                )
        case _:
            pass
    raise damaged(f"a tensor is told as {str(told)[:80]}", place)


def _read_size(told: Json, place: str) -> FreeSize:
    match told:
        case [str(symbol), str(name), [*places], None | int() as low, None | int() as high]:
            pairs = [_two(p, place) for p in places]
            if all(type(n) is str and type(d) is int for n, d in pairs):
                return FreeSize(symbol, name, tuple(cast("list[tuple[str, int]]", pairs)), low, high)
        case _:
            pass
    raise damaged(f"a size is told as {str(told)[:80]}", place)


# --- the plan ------------------------------------------------------------------------------------


def write_plan(
    plan: Plan, constants: Sequence[Tensor], tensors: TensorWriter, loops: KeepLoop = no_loops
) -> Json:
    """A plan as JSON; `loops` keeps what runs its loops. Raises UnsupportedError for what only this process can run."""
    writer = CallWriter(tensors, loops)
    body = writer.write(plan)
    held: list[Json] = [tensors.place(t, "a constant") for t in constants]
    return {"plan": body, "constants": held, "expressions": writer.rows}


def read_plan(
    told: Json, tensors: TensorReader, routines: Routines, place: str, kind: str = "cpu"
) -> tuple[Plan, tuple[Tensor, ...]]:
    """The plan that `write_plan` wrote, for a `kind` of device, and its constants. Raises ArtifactError for others."""
    match told:
        case {"plan": body, "constants": [*held], "expressions": rows} if len(told) == 3:
            plan: Any = CallReader(rows, tensors, routines, place).read(body, Plan)
            constants = tuple(tensors[k] for k in held)
            check_plan(plan, constants, place, kind)
            check_memory(plan)
            return plan, constants
        case _:
            raise damaged("a plan has other parts", place)
