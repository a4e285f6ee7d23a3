"""Defects of every kind that bisection tells apart, planted into one graph of a compilation."""

# What is changed is private to the compiler.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torch import Tensor

from tilewright.bisection import Suspect
from tilewright.bisection.states import CompiledStates
from tilewright.emit.source import Source
from tilewright.ir.expr import call, const
from tilewright.ir.graph import Graph, LibraryCall, Op
from tilewright.ir.kernel import Cover, LibraryStep
from tilewright.ir.pattern import ExprRule, Rewriter, always, any_, apply
from tilewright.pipeline import build, compiler, phases
from tilewright.pipeline.backends import cpu
from tilewright.plan import Launches
from tilewright.rewrite.normal.identities import IEEE_RULES

NORMALISE = importlib.import_module("tilewright.rewrite.normal.normalise")


@dataclass(frozen=True, slots=True)
class Bug:
    """A defect of a `kind` in graph number `graph` (0: forward, 1: backward) of a model. `way` says which, `place` in
    which of the kernels, calls or ops that it can be in."""

    model: str
    kind: str
    way: str
    graph: int = 0
    place: int = 0
    training: bool = False
    freeze: bool = False

    def __str__(self) -> str:
        graph = (
            ("forward", "backward")[self.graph] if self.training else "frozen" if self.freeze else "inference"
        )
        return f"{self.model}-{graph}-{self.kind}-{self.way}-{self.place}"


@dataclass(eq=False)
class Planted:
    """A defect while it is there: whether its place was `met`, and whether a culprit `is_it`."""

    met: bool = False
    is_it: Callable[[Suspect, Sequence[CompiledStates]], bool] = lambda culprit, lowerings: False


Changes = dict[str, tuple[tuple[str, str], ...]]

TEXTS: Changes = {
    "op": (
        (r"store(_part)?\((.*), (\w+(?:\[u\d+\])?)((?:, [^,]*)?)\);", r"store\1(\2, \3 + \3\4);"),
        (r"divided\((v\d+), (v\d+)\)", r"(\1 * \2)"),
        (r"exp\((v\d+) - ", r"exp(\1 + "),
        (r" \+ (v\d+);", r" - \1;"),
        (r" \* ", " + "),
        (r" - ", " + "),
    ),
    "bound": (
        (r"const i64 e0 = (\d+)", r"const i64 e0 = \1 - 1"),
        (r"(for \(i64 a[1-9]\d* = \w+; a\d+ < )(\w+);", r"\1\2 / 2;"),
        (r"(for \(i64 u\d+ = 0; u\d+ < )2;", r"\g<1>1;"),
    ),
    "identity": (
        (r"\(0\.0f\)", "(3.0f)"),
        (r"= 0\.0f;", "= 3.0f;"),
        (r"-__builtin_inff\(\)", "2.0f"),
        (r"\{0\.0f\}", "{3.0f}"),
    ),
}
"""Patterns of generated text, and what a wrong printer would print there."""


def _rule(name: str, op: str, wrong: str, arity: int) -> ExprRule:
    names = ("x", "y")[:arity]
    shape = apply(op, *[any_(n, lambda e: e.dtype.is_float) for n in names])
    return replace(
        IEEE_RULES[0], name=name, match=shape, make=lambda m: call(wrong, *(m[n] for n in names)),
        law=f"{op} = {wrong}", when=always,
    )  # fmt: skip


RULES = {
    "exp": _rule("planted exp", "exp", "expm1", 1),
    "tanh": _rule("planted tanh", "tanh", "sin", 1),
    "div": _rule("planted div", "div", "mul", 2),
    "sub": _rule("planted sub", "sub", "add", 2),
    "abs": _rule("planted abs", "abs", "neg", 1),
    "rsqrt": _rule("planted rsqrt", "rsqrt", "sqrt", 1),
    "mul": _rule("planted mul", "mul", "add", 2),
}


class _Counter:
    """Counts calls, one per graph, and says which is the one."""

    def __init__(self, graph: int) -> None:
        self.left = graph

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == -1


@contextmanager
def planted(bug: Bug, attempt: int) -> Generator[Planted]:
    """The defect for what is compiled meanwhile. `attempt` chooses among places in the text of a kernel."""
    state = Planted()
    with PLANTERS[bug.kind](bug, attempt, state):
        yield state


# --- kernels ---


@contextmanager
def _kernel(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    mine, emit, inside = _Counter(bug.graph), cpu.emit_units, [False]

    class Watched(build.KernelBuilder):
        def built(self, *args: Any, **kwargs: Any) -> build.Kernels:
            inside[0] = mine()
            try:
                return super().built(*args, **kwargs)
            finally:
                inside[0] = False

    def wrong(*args: Any, **kwargs: Any) -> tuple[Source, ...]:
        sources = emit(*args, **kwargs)
        return tuple(_wrong_text(s, bug, attempt, state) for s in sources) if inside[0] else sources

    def is_it(culprit: Suspect, lowerings: Sequence[CompiledStates]) -> bool:
        lowering = lowerings[bug.graph]
        steps = [step for segment in lowering.plan.segments for step in segment.steps]
        launches = [x for step in steps if isinstance(step, Launches) for x in step.launches]
        mine = culprit.kind == "kernel" and culprit.graph == lowering.name
        return mine and launches[int(culprit.name[1:])].kernel == bug.place

    state.is_it = is_it
    with mock.patch.object(phases, "KernelBuilder", Watched), mock.patch.object(cpu, "emit_units", wrong):
        yield


def _wrong_text(source: Source, bug: Bug, attempt: int, state: Planted) -> Source:
    start = re.search(rf"void k{bug.place}\(void\* state.*?\n}}\n", source.text, re.DOTALL)
    if start is None:
        return source
    text = start.group()
    places = [(m, new) for old, new in TEXTS[bug.way] for m in re.finditer(old, text)]
    if attempt >= len(places):
        return source
    found, new = places[attempt]
    state.met = True
    changed = text[: found.start()] + found.expand(new) + text[found.end() :]
    return replace(source, text=source.text.replace(text, changed))


# --- calls ---


def _changing_first(call_: LibraryCall, change: Callable[[Tensor], Tensor]) -> LibraryCall:
    """The call with another first result."""

    def run(*args: Any, **kwargs: Any) -> object:
        made: Any = call_.function(*args, **kwargs)
        return change(made) if isinstance(made, Tensor) else (change(made[0]), *made[1:])

    return replace(call_, function=run, spare=None, reuses=-1)


def _scaled(call_: LibraryCall) -> LibraryCall:
    return _changing_first(call_, lambda t: t * 1.25 + 0.125)


def _flipped(call_: LibraryCall) -> LibraryCall:
    """As with a stride of 0 along the first dim."""
    return _changing_first(call_, lambda t: t.as_strided(t.shape, (0, *t.stride()[1:])).clone())


def _at_offset_0(call_: LibraryCall) -> LibraryCall:
    """Reads its operands as if each began where its storage does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        moved = [a.as_strided(a.shape, a.stride(), 0) if isinstance(a, Tensor) else a for a in args]
        return call_.function(*moved, **kwargs)

    return replace(call_, function=run, spare=None)


CALLS = {"scaled": _scaled, "strided": _flipped}


def _wrong_call(graph: Graph, bug: Bug, state: Planted) -> Graph:
    numbers = [k for k, op in enumerate(graph.ops) if op.call is not None]
    if bug.place >= len(numbers):
        return graph
    op = graph.ops[numbers[bug.place]]
    assert op.call is not None
    state.met = True
    ops = list(graph.ops)
    ops[numbers[bug.place]] = replace(op, call=CALLS[bug.way](op.call))
    shown = repr(op.outputs[-1]) if len(op.outputs) == 1 else " ".join(map(repr, op.outputs))
    state.is_it = lambda culprit, lowerings: (
        culprit.kind == "call"
        and culprit.graph == lowerings[bug.graph].name
        and shown in (culprit.value, *culprit.inside)
    )
    return graph.with_ops(ops)


@contextmanager
def _call(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    phase = "select" if bug.freeze is False else "specialise"
    with _after(phase, bug, lambda graph: _wrong_call(graph, bug, state)):
        yield


@contextmanager
def _offset(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    mine, right = _Counter(bug.graph), phases.partition

    def wrong(*args: Any, **kwargs: Any) -> Cover:
        cover = right(*args, **kwargs)
        numbers = [k for k, step in enumerate(cover.steps) if isinstance(step, LibraryStep)]
        if not mine() or bug.place >= len(numbers):
            return cover
        state.met = True
        steps = list(cover.steps)
        step = steps[numbers[bug.place]]
        assert isinstance(step, LibraryStep) and step.op.call is not None
        steps[numbers[bug.place]] = replace(step, op=replace(step.op, call=_at_offset_0(step.op.call)))
        shown = " ".join(map(repr, step.op.outputs))
        state.is_it = lambda culprit, lowerings: (
            (culprit.kind, culprit.phase, culprit.value) == ("call", "plan", shown)
            and culprit.graph == lowerings[bug.graph].name
        )
        return replace(cover, steps=tuple(steps))

    with mock.patch.object(phases, "partition", wrong):
        yield


# --- rewrites, declarations, capture ---


@contextmanager
def _after(name: str, bug: Bug, change: Callable[[Graph], Graph]) -> Generator[None]:
    """`change` what the phase `name` makes of the graph of the bug."""
    each = 2 if name == "normalise" else 1  # it is run again behind `specialise`
    owner = compiler if name == "from_fx" else phases
    mine, right = _Counter(each * bug.graph), getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Graph:
        made = right(*args, **kwargs)
        return change(made) if mine() else made

    with mock.patch.object(owner, name, wrong):
        yield


def _wrong_op(graph: Graph, bug: Bug, attempt: int, state: Planted, kind: str, phase: str) -> Graph:
    numbers = [
        k for k, op in enumerate(graph.ops)
        if op.expr is not None and op.expr.body[0].dtype.is_float and not op.expr.is_view()
    ]  # fmt: skip
    place = bug.place + attempt
    if place >= len(numbers):
        return graph
    op = graph.ops[numbers[place]]
    assert op.expr is not None
    state.met = True
    first, *rest = op.expr.body
    body = call("add", call("mul", first, const(1.5, first.dtype)), const(0.25, first.dtype))
    ops = list(graph.ops)
    ops[numbers[place]] = replace(op, expr=replace(op.expr, body=(body, *rest)))
    shown = " ".join(map(repr, op.outputs))
    state.is_it = lambda culprit, lowerings: (
        (culprit.kind, culprit.phase, culprit.graph) == (kind, phase, lowerings[bug.graph].name)
        and shown in (culprit.value, *culprit.inside)
    )
    return graph.with_ops(ops)


@contextmanager
def _rewrite(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    names = {"normalise": "normalise", "split": "split_reductions", "freeze": "freeze"}

    def change(graph: Graph) -> Graph:
        return _wrong_op(graph, bug, attempt, state, "rewrite", bug.way)

    with _after(names[bug.way], bug, change):
        yield


@contextmanager
def _declaration(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    def change(graph: Graph) -> Graph:
        return _wrong_op(graph, bug, attempt, state, "declaration", "capture")

    with _after("from_fx", bug, change):
        yield


@contextmanager
def _capture(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    def change(graph: Graph) -> Graph:
        called = [o for o in graph.origins if o.call is not None and not o.view and o.outputs]
        place = bug.place + attempt
        if place >= len(called):
            return graph
        origin = called[place]
        assert origin.call is not None
        state.met = True
        new = _scaled(origin.call)
        old = origin.call
        state.is_it = lambda culprit, lowerings: (
            culprit.kind == "capture" and culprit.name == (origin.node or origin.name)
        )

        def bent(op: Op) -> Op:
            return replace(op, call=new) if op.call is old else op

        origins = tuple(replace(o, call=new) if o is origin else o for o in graph.origins)
        return replace(graph, ops=tuple(map(bent, graph.ops)), origins=origins)

    with _after("from_fx", bug, change):
        yield


@contextmanager
def _wrong_rule(bug: Bug, attempt: int, state: Planted) -> Generator[None]:
    rule = RULES[bug.way]
    state.met = True
    state.is_it = lambda culprit, lowerings: (
        culprit.kind == "rewrite"
        and culprit.phase in ("freeze", "normalise")
        and f"wrong rule: {rule.name}:" in culprit.detail
    )
    with mock.patch.object(NORMALISE, "_SIMPLER", Rewriter((rule, *IEEE_RULES))):
        yield


PLANTERS = {
    "kernel": _kernel, "call": _call, "offset": _offset, "rewrite": _rewrite, "declaration": _declaration,
    "capture": _capture, "rule": _wrong_rule,
}  # fmt: skip
