"""The captured program of an artifact as a module that torch runs op by op: what a loaded model is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from tilewright.errors import ArtifactError
from tilewright.interp.graph import bind
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Graph, Operand, Value
from tilewright.ir.kernel import LibraryStep, Step
from tilewright.ir.sizes.host import Number, number
from tilewright.library.select import library_cover
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.call_form import CallForm, ProgramCall
from tilewright.runtime.plan.known_sizes import Result


class EagerProgram(nn.Module):
    """A captured graph, called as the program that it is of. Tensors that the program writes to are its own."""

    def __init__(self, graph: Graph, form: CallForm) -> None:
        super().__init__()
        for k, (_, t) in enumerate(form.given):
            self.register_buffer(f"held{k}", None if t is None else t.clone())
        for k, t in enumerate(graph.constants.values()):
            self.register_buffer(f"constant{k}", t if isinstance(t, Tensor) else None)
        self._fixed = _Fixed(graph, form)

    def forward(self, *args: object, **kwargs: object) -> object:
        """The program's result."""
        given, graph = self._fixed.form, self._fixed.graph
        held = [
            self.get_buffer(f"held{k}") if t is not None else None for k, (_, t) in enumerate(given.given)
        ]
        made = [(leaf, mine) for (leaf, _), mine in zip(given.given, held, strict=True)]
        old = {id(t): mine for (_, t), mine in zip(given.given, held, strict=True) if t is not None}
        writes = {k: old[id(t)] if isinstance(t, Tensor) else t for k, t in given.writes.items()}
        form = CallForm(
            given.inputs, tuple(made), given.in_spec, given.out_spec,
            cast("Mapping[int, Tensor | int]", writes), given.written, given.constants,
        )  # fmt: skip
        constants = [self.get_buffer(f"constant{k}") for k in range(len(graph.constants))]
        runs = _OpByOp(graph, self._fixed.steps, constants)
        return ProgramCall(form, runs).run(form.flatten(args, kwargs), None)


class _Fixed:
    """What copies of a module share."""

    def __init__(self, graph: Graph, form: CallForm) -> None:
        self.graph, self.form = graph, form
        self.steps = library_cover(graph).steps

    def __deepcopy__(self, memo: dict[int, object]) -> _Fixed:
        return self


class _OpByOp:
    """Runs each captured op as torch's own call."""

    written: tuple[int, ...] = ()

    def __init__(self, graph: Graph, steps: Sequence[Step], constants: Sequence[Tensor]) -> None:
        self._graph, self._steps, self._constants = graph, steps, constants

    def admits(self, args: Sequence[Argument]) -> bool:
        """As torch sees it when it runs."""
        return len(args) == len(self._graph.inputs)

    def __call__(self, args: list[Argument], out: Sequence[Tensor | None] | None = None) -> list[Result]:
        """The results, in order."""
        graph = self._graph
        values: dict[Value, object] = dict(zip(graph.constants, self._constants, strict=True))
        sizes: dict[str, Number] = {}
        for want, given in zip(graph.inputs, args, strict=True):
            if isinstance(want, Value):
                values[want] = given
            elif isinstance(want.value, Symbol):
                sizes[want.value.name] = cast(Number, given)
        for v in graph.inputs:
            if isinstance(v, Value):
                bind(v, tuple(cast(Tensor, values[v]).shape), cast("dict[str, int | float]", sizes))
        for step in self._steps:
            if isinstance(step, LibraryStep):
                _run(step, values, sizes)
        results = [self._result(o, values, sizes) for o in graph.outputs]
        for w in graph.writes:
            cast(Tensor, args[w.input]).copy_(cast(Tensor, values[w.value]))
        return results

    def _result(
        self, o: Value | Expr | None, values: Mapping[Value, object], sizes: Mapping[str, Number]
    ) -> Result:
        if isinstance(o, Value):
            return cast(Tensor, values[o])
        return None if o is None else number(o, sizes)


def _run(step: LibraryStep, values: dict[Value, object], sizes: dict[str, Number]) -> None:
    op, call = step.op, step.op.call
    assert call is not None
    if call.loop is not None:
        raise ArtifactError("a loop cannot be run op by op", op=call.name)
    operands = [values[v] for v in op.inputs]
    kwargs = {name: _filled(a, operands, sizes) for name, a in call.kwargs}
    made = call.function(*[_filled(a, operands, sizes) for a in call.args], **kwargs)
    flat = list(_flat(made))
    places = call.places or range(len(op.outputs) + len(op.binds))
    for k, v in zip(places, op.outputs, strict=False):
        values[v] = flat[k]
        if isinstance(flat[k], Tensor):
            bind(v, tuple(cast(Tensor, flat[k]).shape), cast("dict[str, int | float]", sizes))
    for k, e in zip(list(places)[len(op.outputs) :], op.binds, strict=False):
        if isinstance(e.value, Symbol):
            found = flat[k]
            sizes[e.value.name] = cast(Number, found.item() if isinstance(found, Tensor) else found)


def _flat(made: object) -> Sequence[object]:
    if isinstance(made, (tuple, list)):
        return [x for part in cast("Sequence[object]", made) for x in _flat(part)]
    return [made]


def _filled(a: object, operands: Sequence[object], sizes: Mapping[str, Number]) -> object:
    match a:
        case Operand():
            return operands[a.index]
        case Expr():
            return number(a, sizes)
        case list():
            return [_filled(x, operands, sizes) for x in cast("list[object]", a)]
        case tuple():
            return tuple(_filled(x, operands, sizes) for x in cast("tuple[object, ...]", a))
        case _:
            return a
