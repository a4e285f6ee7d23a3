"""Whether a plan that was read fits together: every number of a buffer, an input, a kernel is one that there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tilewright.artifact.file.strict_json import damaged
from tilewright.errors import VerifyError
from tilewright.ir.graph import Operand, symbols_in
from tilewright.ir.sizes import dims
from tilewright.plan.bind import check_bound
from tilewright.plan.data import Buffer, CallStep, Copy, Home, Launches, Plan, Spec, View
from tilewright.runtime.plan.tensors import torch_dtype


def check_plan(plan: Plan, constants: Sequence[Tensor], place: str, kind: str = "cpu") -> None:
    """Raise ArtifactError unless all numbers of a plan are in range, its constants are as it says, and it runs on a
    device of this `kind`."""
    try:
        if torch.device(plan.device).type != kind:
            raise ValueError("it runs elsewhere")
        _check(plan, constants)
    except (VerifyError, ValueError, AttributeError, AssertionError, RuntimeError) as bad:
        raise damaged(f"its plan does not fit together: {bad}", place) from bad


def _check(plan: Plan, constants: Sequence[Tensor]) -> None:
    if len(plan.arguments) != len(plan.inputs):
        raise ValueError("its inputs have other numbers")
    _within("input", (b for b in plan.arguments if b != -1), len(plan.buffers))
    _within("input", (b.input for b in plan.bindings), len(plan.inputs))
    _within("input", (*plan.written, *plan.host, *(k for k, _ in plan.placed)), len(plan.inputs))
    _within("buffer", (o for o in plan.outputs if isinstance(o, int)), len(plan.buffers))
    for k, spec in enumerate(plan.inputs):
        b = plan.arguments[k]
        if isinstance(spec, Spec) and not (
            b >= 0 and plan.buffers[b].home is Home.INPUT and plan.buffers[b].index == k
        ):
            raise ValueError(f"input {k} has no buffer")
        if not isinstance(spec, Spec) and b != -1:
            raise ValueError(f"input {k} has a buffer")
    for k, b in enumerate(plan.buffers):
        _buffer(k, b, plan, constants)
    for segment in plan.segments:
        for numbers in (*segment.frees, *segment.makes):
            _within("buffer", numbers, len(plan.buffers))
        _within("buffer", (m.buffer for m in segment.measures), len(plan.buffers))
        for step in segment.steps:
            _step(step, len(plan.buffers))
    known = {b.symbol for b in plan.bindings} | {m.symbol for s in plan.segments for m in s.measures}
    if not symbols_in((plan.buffers, plan.outputs, plan.inputs)) <= known or not set(plan.symbols) <= known:
        raise ValueError("a size is found nowhere")
    check_bound(plan)


def _buffer(k: int, b: Buffer, plan: Plan, constants: Sequence[Tensor]) -> None:
    if (
        len(b.spec.shape) != len(b.spec.strides)
        or not 0 <= b.start <= b.end
        or not 0 <= b.segment < len(plan.segments)
    ):
        raise ValueError(f"buffer b{k} has no such shape or life")
    if not -1 <= b.source < k or (b.home is Home.VIEW and b.source < 0):
        raise ValueError(f"buffer b{k} is a view of what is not there")
    if b.home is Home.CONSTANT:
        _within("constant", (b.index,), len(constants))
        t, spec = constants[b.index], b.spec
        if t.dtype is not torch_dtype(spec.dtype) or len(t.shape) != len(spec.shape):
            raise ValueError(f"constant {b.index} is of another type")
        wanted = [(dims.static(n), dims.static(s)) for n, s in zip(spec.shape, spec.strides, strict=True)]
        for (n, s), size, stride in zip(wanted, t.shape, t.stride(), strict=True):
            if n is None or n != size or (n > 1 and s != stride and t.numel()):
                raise ValueError(f"constant {b.index} lies otherwise")
    elif b.home is Home.INPUT:
        _within("input", (b.index,), len(plan.inputs))


def _step(step: object, buffers: int) -> None:
    match step:
        case Launches():
            for launch in step.launches:
                _within("buffer", launch.params, buffers)
                if launch.kernel < 0 or not 0 <= launch.stores <= len(launch.params):
                    raise ValueError("a launch of no kernel")
        case CallStep():
            _within("buffer", (*step.inputs, *step.outputs), buffers)
            given = (*step.call.args, *(v for _, v in step.call.kwargs))
            _within("operand", (o.index for o in _operands(given)), len(step.inputs))
        case View():
            _within("buffer", (step.buffer,), buffers)
        case Copy():
            _within("buffer", (step.source, step.target), buffers)
        case _:
            raise ValueError("a step of another kind")


def _operands(args: Iterable[object]) -> Iterable[Operand]:
    for a in args:
        if isinstance(a, Operand):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _operands(a)  # pyright: ignore[reportUnknownArgumentType]


def _within(what: str, numbers: Iterable[int], below: int) -> None:
    for n in numbers:
        if not 0 <= n < below:
            raise ValueError(f"there is no {what} {n}")
