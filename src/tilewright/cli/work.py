"""What the verbs do once their arguments are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from tilewright import measure
from tilewright.errors import InputError
from tilewright.ir.kernel import Cover, Scheduled
from tilewright.options import PREFIX, Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.plan import Plan
from tilewright.plan.portable import to_json
from tilewright.runtime.plan.bound import intermediate_bytes
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.edge import TileGraph
from tilewright.tilegraph.traffic import traffic

from .model import Model, inputs_for, load, parse_pairs, parse_shape
from .request import ExitCode, Request
from .show import Cell, Json, size


class Phase(Protocol):
    """One phase of a trace."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def result(self) -> object: ...


class Record(Protocol):
    """One kernel or call: bytes, operations and modelled seconds at the sizes that its graph was traced with."""

    @property
    def name(self) -> str: ...
    @property
    def ops(self) -> Sequence[str]: ...
    @property
    def bytes_moved(self) -> int | None: ...
    @property
    def flops(self) -> int | None: ...
    @property
    def exps(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...


class KernelRecord(Record, Protocol):
    """One generated kernel, and why it ends where it does."""

    @property
    def bytes_lower_bound(self) -> int | None: ...
    @property
    def source(self) -> str: ...
    @property
    def reason(self) -> str: ...


class CallRecord(Record, Protocol):
    """One call that no kernel was generated for: whose code it is, why, and what it makes."""

    @property
    def how(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def results(self) -> Sequence[str]: ...


class Trace(Protocol):
    """What a compilation did."""

    @property
    def phases(self) -> Sequence[Phase]: ...


class Compiled(Protocol):
    """What `tilewright.compile` returns, as far as the command line looks."""

    @property
    def coverage(self) -> object: ...
    @property
    def kernels(self) -> Sequence[KernelRecord]: ...
    @property
    def calls(self) -> Sequence[CallRecord]: ...
    @property
    def trace(self) -> Trace: ...
    def __call__(self, *inputs: Tensor) -> object: ...


# Reading the request.


def options_of(request: Request) -> Options:
    """Options from `--option` and `--threads`, over the environment."""
    texts = parse_pairs(request.options, "--option")
    environ = {PREFIX + name.upper(): value for name, value in texts.items()}
    known = {PREFIX + name.upper() for name in Options.__dataclass_fields__}
    for name in texts:
        if PREFIX + name.upper() not in known:
            Options.make({name: texts[name]})  # raises, with a hint at the nearest name
    given: dict[str, object] = {}
    if request.threads is not None:
        given["threads"] = request.threads
    base = Options.make(given)
    typed = Options.make(None, environ)
    return base.replace(**{name: getattr(typed, name) for name in texts})


def inputs_of(request: Request, model: Model) -> tuple[Tensor, ...]:
    """The inputs that the request names, by position."""
    files = parse_pairs(request.files, "--input", "=@")
    shapes = {name: parse_shape(text) for name, text in parse_pairs(request.shapes, "--shape").items()}
    return inputs_for(model, files, shapes, request.seed)


def compile_for(request: Request, model: Model, inputs: tuple[Tensor, ...] | None) -> Compiled:
    """Compile as requested."""
    compile_: Callable[..., Compiled] = importlib.import_module("tilewright.api").compile
    target = str(model.target) if isinstance(model.target, Path) else model.target
    return compile_(target, inputs, strict=request.strict, freeze=request.freeze, options=options_of(request))


def threads_of(request: Request) -> int:
    """`--threads`, else torch's own number."""
    return request.threads or torch.get_num_threads()


# Showing what was compiled.


def show_compiled(request: Request, compiled: Compiled) -> None:
    """Coverage and phases."""
    screen = request.screen
    coverage = str(compiled.coverage)
    screen.line(coverage)
    phases = [(phase.name, phase.seconds) for phase in compiled.trace.phases]
    total = sum(seconds for _, seconds in phases)
    rows: list[Sequence[Cell]] = [(name, seconds * 1e3) for name, seconds in phases]
    screen.table("phases", ("phase", "ms"), [*rows, ("all", total * 1e3)])
    screen.facts["coverage"] = coverage
    screen.facts["calls"] = [_call_facts(call) for call in compiled.calls]
    screen.facts["phases"] = [{"name": name, "seconds": seconds} for name, seconds in phases]


def _kernel_facts(kernel: KernelRecord, with_source: bool) -> dict[str, Json]:
    facts: dict[str, Json] = {
        "name": kernel.name,
        "ops": [str(op) for op in kernel.ops],
        "bytes_moved": kernel.bytes_moved,
        "bytes_lower_bound": kernel.bytes_lower_bound,
        "flops": kernel.flops,
        "exps": kernel.exps,
        "modelled_us": _microseconds(kernel),
        "reason": kernel.reason,
    }
    return facts | ({"source": kernel.source} if with_source else {})


def _show_kernels(request: Request, compiled: Compiled, with_source: bool) -> None:
    rows: list[Sequence[Cell]] = []
    for kernel in compiled.kernels:
        moved, bound = kernel.bytes_moved, kernel.bytes_lower_bound
        over = f"{moved / bound:.2f}x" if moved is not None and bound else "-"
        ops = " ".join(str(op) for op in kernel.ops)
        work = kernel.flops, kernel.exps, _microseconds(kernel)
        rows.append((kernel.name, size(moved), size(bound), over, *work, kernel.reason, ops))
    columns = ("kernel", "bytes moved", "lower bound", "ratio", "flops", "exps", "modelled us")
    columns += ("why it ends there", "ops")
    request.screen.table("kernels", columns, rows)
    moved = sum(kernel.bytes_moved or 0 for kernel in compiled.kernels)
    bound = sum(kernel.bytes_lower_bound or 0 for kernel in compiled.kernels)
    request.screen.line(f"{len(compiled.kernels)} kernels move {size(moved)}; lower bound {size(bound)}")
    request.screen.facts["kernels"] = [_kernel_facts(k, with_source) for k in compiled.kernels]


def _call_facts(call: CallRecord) -> dict[str, Json]:
    return {
        "name": call.name, "ops": list(call.ops), "how": call.how, "reason": call.reason, "results": list(call.results),
        "bytes_moved": call.bytes_moved, "flops": call.flops, "exps": call.exps, "modelled_us": _microseconds(call),
    }  # fmt: skip


def _microseconds(record: Record) -> float | None:
    return None if record.seconds is None else 1e6 * record.seconds


def _show_calls(request: Request, compiled: Compiled) -> None:
    columns = ("call", "whose", "why", "bytes moved", "flops", "exps", "modelled us", "makes", "ops")
    rows: list[Sequence[Cell]] = [
        (
            call.name, call.how, call.reason, size(call.bytes_moved), call.flops, call.exps, _microseconds(call),
            " ".join(call.results), " ".join(call.ops),
        )
        for call in compiled.calls
    ]  # fmt: skip
    if rows:
        request.screen.table("calls", columns, rows)


def _show_memory(request: Request, compiled: Compiled) -> None:
    """What lives between kernels and calls."""
    plan = next((phase.result for phase in compiled.trace.phases if phase.name == "plan"), None)
    sizes = next((record.sizes for record in (*compiled.kernels, *compiled.calls)), {})
    needed = intermediate_bytes(plan, sizes) if isinstance(plan, Plan) else None
    request.screen.line(f"intermediates take {size(needed)}")
    request.screen.facts["intermediate_bytes"] = needed


def tilegraph_of(compiled: Compiled) -> TileGraph | None:
    """The tile-graph of what was compiled, without the bodies of loops; None if it has no cover. (Of a phase that ran
    again, the last result counts.)"""
    made = {phase.name: phase.result for phase in compiled.trace.phases}
    cover, schedules, plan = made.get("partition"), made.get("schedule", ()), made.get("plan")
    if not isinstance(cover, Cover) or not isinstance(schedules, Sequence):
        return None
    known = cast(Sequence[Scheduled], schedules)
    return connect(cover, known, plan.host if isinstance(plan, Plan) else ())


def _show_levels(request: Request, compiled: Compiled) -> None:
    """At which level of memory edges are, and the bytes that move there."""
    graph = tilegraph_of(compiled)
    if graph is None:
        return
    sizes = next((record.sizes for record in (*compiled.kernels, *compiled.calls)), {})
    try:
        moved = traffic(graph, sizes)
    except KeyError:  # a size that comes from data
        moved = {}
    rows = [(level.name, len(graph.at(level)), moved.get(level)) for level in graph.levels()]
    request.screen.table(
        "levels", ("level", "edges", "bytes moved"), [(name, n, size(b)) for name, n, b in rows]
    )
    on_chip = sum(e.on_chip for e in graph.edges)
    request.screen.line(f"{on_chip} of {len(graph.edges)} edges stay on chip")
    request.screen.facts["levels"] = [{"level": name, "edges": n, "bytes_moved": b} for name, n, b in rows]


def _show_regions(request: Request, compiled: Compiled) -> None:
    """What was decided about contractions whose large results are folded again."""
    found = next((phase.result for phase in compiled.trace.phases if phase.name == "map"), None)
    regions = [str(region) for region in found.regions] if isinstance(found, ChosenRegions) else []
    for text in regions:
        request.screen.block(text)
    request.screen.facts["regions"] = regions


# The verbs.


def compile_model(request: Request) -> int:
    """`compile`: coverage, phases and kernels; in JSON the plan too. A file with dynamic sizes needs no inputs."""
    with request.progress(f"compiling {request.model}"), measure.settings(threads_of(request)):
        model = load(request.model)
        named = request.files or request.shapes or model.inputs is not None
        compiled = compile_for(request, model, inputs_of(request, model) if named else None)
    show_compiled(request, compiled)
    request.screen.facts["kernels"] = [_kernel_facts(k, True) for k in compiled.kernels]
    plan = next((phase.result for phase in compiled.trace.phases if phase.name == "plan"), None)
    if isinstance(plan, Plan):
        request.screen.facts["plan"] = to_json(plan)
    return ExitCode.OK


def run_model(request: Request, save: str | None) -> int:
    """`run`: one call, a line per output; `save` is a folder for `.npy` files."""
    with request.progress(f"running {request.model}"), measure.settings(threads_of(request)):
        model = load(request.model)
        inputs = inputs_of(request, model)
        compiled = compile_for(request, model, inputs)
        outputs = measure.flatten(compiled(*inputs))
    rows: list[Sequence[Cell]] = []
    facts: list[Json] = []
    for i, tensor in enumerate(outputs):
        entry = _summary(i, tensor)
        facts.append(entry)
        shape = "x".join(str(n) for n in tensor.shape) or "scalar"
        rows.append(
            (str(i), shape, str(tensor.dtype).removeprefix("torch."), *(entry[k] for k in STATISTICS))
        )
    request.screen.line(str(compiled.coverage))
    request.screen.table("outputs", ("output", "shape", "dtype", *STATISTICS), rows)
    request.screen.facts |= {"coverage": str(compiled.coverage), "outputs": facts}
    if save is not None:
        _save(outputs, Path(save))
    return ExitCode.OK


STATISTICS = ("min", "mean", "max", "not finite")


def _summary(i: int, tensor: Tensor) -> dict[str, int | float | None]:
    wide = tensor.detach().double().reshape(-1)
    finite = wide[wide.isfinite()]
    entry: dict[str, int | float | None] = {"output": i, "min": None, "mean": None, "max": None}
    if finite.numel():
        entry |= {"min": float(finite.min()), "mean": float(finite.mean()), "max": float(finite.max())}
    return entry | {"not finite": wide.numel() - finite.numel()}


def _save(outputs: Sequence[Tensor], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, tensor in enumerate(outputs):
            np.save(folder / f"{i}.npy", tensor.detach().numpy(), allow_pickle=False)
    except (OSError, TypeError) as error:
        raise InputError(f"cannot write outputs: {error}", phase="cli", place=str(folder)) from error


def explain_model(request: Request, with_source: bool) -> int:
    """`explain`: every kernel with its traffic and the reason of its boundary, and the bytes at each memory level."""
    with request.progress(f"compiling {request.model}"), measure.settings(threads_of(request)):
        model = load(request.model)
        named = request.files or request.shapes or model.inputs is not None
        compiled = compile_for(request, model, inputs_of(request, model) if named else None)
    show_compiled(request, compiled)
    _show_kernels(request, compiled, with_source)
    _show_calls(request, compiled)
    _show_memory(request, compiled)
    _show_levels(request, compiled)
    _show_regions(request, compiled)
    if with_source:
        for kernel in compiled.kernels:
            request.screen.line(f"\n// {kernel.name}", style="bold")
            request.screen.block(kernel.source)
    return ExitCode.OK
