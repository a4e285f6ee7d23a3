"""`inspect`: what a model takes, gives and is made of, and which of its ops would be kernels; nothing is built."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence

from tilewright import measure
from tilewright.artifact.way import LoadedWay
from tilewright.capture.described import Signature, TensorInfo
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.pipeline.phases import check_phases
from tilewright.pipeline.state import State
from tilewright.plan.coverage import Coverage, coverage_of, is_counted, total
from tilewright.report.texts import size
from tilewright.runtime.call.model import CompiledModel

from .model import Model
from .request import CommandRequest, ExitCode
from .show import Cell, Json
from .sizes import Chosen
from .work import options_of, prepared, refuse_changes, target_of, threads_of


class _Seen(TilewrightError):
    """Ends a compilation of which all is known that is asked."""


def inspect_model(request: CommandRequest) -> int:
    """`inspect`: inputs, outputs, dims, ops."""
    with request.progress(f"reading {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        if isinstance(model.target, CompiledModel):
            refuse_changes(request)
            _show_signature(request, model, chosen, model.target.signature)
            _show_artifact(request, model.target)
            return ExitCode.OK
        compiled, states = _planned(request, model, chosen)
        signature = compiled.signature if states and compiled is not None else None
    _show_signature(request, model, chosen, signature)
    _show_ops(request, states)
    return ExitCode.OK


def _planned(
    request: CommandRequest, model: Model, chosen: Chosen
) -> tuple[CompiledModel | None, list[State]]:
    """The model with its graphs as they are once it is decided which ops share a kernel; None for a program, which is
    compiled before it is called. One that is cut at control flow has several graphs, and what comes behind one needs
    its results: such a one is built."""
    compile_: Callable[..., CompiledModel] = importlib.import_module("tilewright.api").compile
    several = bool(getattr(model.eager, "data_dependent", ()))
    states: list[State] = []

    def look(name: str, state: State) -> None:
        if name == "partition" and not state.request.repeated:
            states.append(state)
            if not several:
                raise _Seen("all is known", phase="cli")

    options: Options = options_of(request).replace(measure=False)
    target, given = target_of(request, model)
    compiled = None
    with check_phases(look):
        try:
            compiled = compile_(
                target, None, strict=request.strict, freeze=request.freeze, options=options, **given
            )
            compiled.prepare(chosen.inputs, {})
        except _Seen:
            pass
    return compiled, states


def _show_signature(
    request: CommandRequest, model: Model, chosen: Chosen, signature: Signature | None
) -> None:
    screen = request.screen
    if signature is None:
        given = zip(model.names, chosen.inputs, strict=True)
        signature = Signature(tuple(TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in given))
    for title, infos in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        rows: list[Sequence[Cell]] = [(t.name, _kind(t), _shape(t)) for t in infos]
        screen.table(title, (title[:-1], "type", "shape"), rows)
        screen.facts[title] = [
            {"name": t.name, "type": _kind(t), "shape": None if t.shape is None else list(t.shape)}
            for t in infos
        ]
    sizes: list[Sequence[Cell]] = [
        (s.name, " ".join(f"{n}:{k}" for n, k in s.places) or "data", f"{s.low or 0}..{s.high or ''}")
        for s in signature.sizes
    ]
    if sizes:
        screen.table("dims", ("dim", "where", "range"), sizes)
    screen.facts["dims"] = [
        {"name": s.name, "places": [list(p) for p in s.places], "low": s.low, "high": s.high}
        for s in signature.sizes
    ]
    held = {id(t): t.numel() * t.element_size() for t in (*model.eager.parameters(), *model.eager.buffers())}
    screen.line(f"weights take {size(sum(held.values()))}")
    screen.facts["weight_bytes"] = sum(held.values())


def _show_artifact(request: CommandRequest, model: CompiledModel) -> None:
    """What is compiled in it, and for which machine."""
    coverage = model.coverage
    assert isinstance(model.way, LoadedWay)
    request.screen.line(str(coverage))
    request.screen.line(model.way.origin)
    request.screen.facts |= {
        "coverage": str(coverage),
        "kernels": coverage.kernels,
        "artifact": model.way.origin,
    }


def _kind(info: TensorInfo) -> str:
    return "-" if info.dtype is None else str(info.dtype).removeprefix("torch.")


def _shape(info: TensorInfo) -> str:
    return "unknown" if info.shape is None else f"[{', '.join(map(str, info.shape))}]"


def _show_ops(request: CommandRequest, states: Sequence[State]) -> None:
    """Each op with how often it is there, and what runs it."""
    screen = request.screen
    covers = [s.cover for s in states if s.cover is not None]
    coverage = total([coverage_of(cover) for cover in covers])
    if coverage is None:
        screen.line("the model runs as it is: nothing of it can be compiled")
        screen.facts["ops"] = []
        return
    counts = Counter(o.name for cover in covers for o in cover.graph.origins if is_counted(o))
    by = _runners(coverage)
    rows: list[Sequence[Cell]] = []
    facts: list[Json] = []
    for name, count in counts.most_common():
        runs = by.get(name, Counter[str]())
        left = count - sum(runs.values())
        how = [f"{left} in kernels"] if left > 0 else []
        how += [f"{n} {text}" for text, n in runs.items()]
        rows.append((name, count, "; ".join(how)))
        facts.append({"op": name, "count": count, "generated": max(left, 0), "called": dict(runs)})
    screen.table("ops", ("op", "count", "how"), rows)
    text = str(coverage).split(";")[0].replace("generated", "would generate", 1)
    screen.line(
        f"{text}; kernels are chosen by the model of the machine, calls that are timed may go another way"
    )
    screen.facts |= {"ops": facts, "coverage": str(coverage), "kernels": coverage.kernels}


def _runners(coverage: Coverage) -> dict[str, Counter[str]]:
    """What runs ops that no kernel is generated for, and how many of each."""
    found: dict[str, Counter[str]] = {}
    for rows, how in (
        (coverage.own, "in a routine of our own"),
        (coverage.choice, "as a library call by choice"),
        (coverage.need, "as a library call by need"),
    ):
        for row in rows:
            found.setdefault(row.name, Counter())[f"{how} ({row.reason})"] += row.count
    return found
