"""What the verbs do once their arguments are read: the model, its inputs, how it is compiled, what is shown of that."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tilewright import measure
from tilewright.errors import InputError
from tilewright.options import PREFIX, Options
from tilewright.plan import Plan
from tilewright.plan.portable import to_json
from tilewright.report.records import CallRecord, Compiled, KernelRecord, WorkRecord, result_of
from tilewright.report.texts import size
from tilewright.runtime.call.model import CompiledModel
from tilewright.target import preset

from .model import ARTIFACT, Model, load, moved, parse_pairs, placed
from .request import CommandRequest, ExitCode, Precision
from .show import Cell, Json, Screen
from .sizes import Chosen, choose, dims_of, shown


def phases_of(compiled: Compiled) -> list[tuple[str, float]]:
    """Name and seconds of all phases, those of one name together, in the order in which they first ran."""
    found: dict[str, float] = {}
    traces = {id(graph.trace): graph.trace for graph in compiled.compilations}  # an artifact is loaded once
    for trace in traces.values():
        for phase in trace.phases:
            found[phase.name] = found.get(phase.name, 0.0) + phase.seconds
    return list(found.items())


def seconds_of(phases: Sequence[tuple[str, float]]) -> float:
    """How long all of these phases took together."""
    return sum(seconds for _, seconds in phases)


# Reading the request.


def options_of(request: CommandRequest) -> Options:
    """Options from `--option`, `--threads` and `--precision`, over the environment."""
    texts = parse_pairs(request.options, "--option")
    environ = {PREFIX + name.upper(): value for name, value in texts.items()}
    known = {PREFIX + name.upper() for name in Options.__dataclass_fields__}
    for name in texts:
        if PREFIX + name.upper() not in known:
            Options.make({name: texts[name]})  # raises, with a hint at the nearest name
    given: dict[str, object] = {}
    if request.threads is not None:
        given["threads"] = request.threads
    if request.precision is not None:
        given["tf32"] = request.precision == Precision.TF32.value
    base = Options.make(given)
    try:
        typed = Options.make(None, environ)
    except InputError as bad:  # it names the variable, which nobody has set
        bad.place = (
            f"--option {bad.place.removeprefix(PREFIX).lower()}" if bad.place in environ else bad.place
        )
        raise
    return base.replace(**{name: getattr(typed, name) for name in texts})


def prepared(request: CommandRequest) -> tuple[Model, Chosen]:
    """The model where it was asked for, and inputs, whose sizes are printed. Raises InputError."""
    clock = request.screen.clock
    with clock.phase("imports"):
        importlib.import_module("tilewright.api")
        if request.screen.is_alone:
            gc.freeze()  # modules live to the end: no collection need look at them, which takes 0.2 s each time
    options_of(request)  # a wrong one is told before a large model is read
    precision = None if request.precision is None else Precision(request.precision)
    found = load(request.model, trust=request.trust)
    if isinstance(found.target, CompiledModel):
        refuse_changes(request)
    model = placed(found, request.device, precision)
    loaded = phases_of(cast(Compiled, model.target)) if isinstance(model.target, CompiledModel) else []
    clock.until_now("read model", loaded)
    with clock.phase("choose inputs"):
        chosen = choose(request, model)
        device = None if request.device is None else torch.device(request.device)
        chosen = Chosen(moved(chosen.inputs, device, None), chosen.text, chosen.ours)
    text = shown(model, chosen.inputs)
    request.screen.line(f"sizes: {text or 'no inputs'} ({chosen.text})")
    sizes = {n: list(t.shape) for n, t in zip(model.names, chosen.inputs, strict=True)}
    request.screen.facts |= {"sizes": sizes, "sizes_from": chosen.text}
    return model, chosen


def target_of(request: CommandRequest, model: Model) -> tuple[object, dict[str, object]]:
    """What goes to the compiler, and how besides options."""
    target = str(model.target) if isinstance(model.target, Path) else model.target
    given: dict[str, object] = {"dims": dims_of(request)} if request.dims else {}
    if request.device is not None:
        given["device"] = request.device
    return target, given


def compile_for(request: CommandRequest, model: Model, inputs: tuple[Tensor, ...] | None) -> Compiled:
    """Compile as requested."""
    compile_: Callable[..., Compiled] = importlib.import_module("tilewright.api").compile
    if isinstance(model.target, CompiledModel):
        refuse_changes(request)
        return cast(Compiled, model.target)
    target, given = target_of(request, model)
    options = options_of(request)
    return compile_(target, inputs, strict=request.strict, freeze=request.freeze, options=options, **given)


def refuse_changes(request: CommandRequest) -> None:
    """Raise InputError where something is asked of an artifact that was decided when it was made."""
    asked = {
        "--dim": request.dims, "--option": request.options, "--strict": request.strict,
        "--freeze": request.freeze is not None, "--precision": request.precision, "--device": request.device,
    }  # fmt: skip
    for name, given in asked.items():
        if given:
            raise InputError(
                f"an artifact is compiled already: {name}", phase="cli", op=request.model,
                hint="give it to `tilewright compile MODEL -o FILE.tw`",
            )  # fmt: skip


def compiled_and_run(
    request: CommandRequest, model: Model, inputs: tuple[Tensor, ...]
) -> tuple[Compiled, list[Tensor]]:
    """Compile and call once, each phase by the clock."""
    clock = request.screen.clock
    compiled = compile_for(request, model, inputs)
    if compiled is not model.target:  # else it was loaded before
        clock.until_now("other", phases_of(compiled))
    before = seconds_of(phases_of(compiled))
    outputs = list(measure.flatten(compiled(*inputs)))
    synchronize(outputs)
    again = seconds_of(phases_of(compiled)) - before
    clock.until_now("first run", [("compiled again", again)] if again > 0 else [])
    return compiled, outputs


def synchronize(outputs: Sequence[Tensor]) -> None:
    """Wait until tensors are there."""
    for device in {t.device for t in outputs if t.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def threads_of(request: CommandRequest) -> int:
    """`--threads`, else torch's own number."""
    return request.threads or torch.get_num_threads()


# Showing what was compiled.


def show_compiled(request: CommandRequest, compiled: Compiled) -> None:
    """Coverage, and what is told of calls."""
    coverage = str(compiled.coverage)
    request.screen.line(coverage)
    request.screen.facts["coverage"] = coverage
    request.screen.facts["calls"] = [call_facts(call) for g in compiled.compilations for call in g.calls]


def show_phases(request: CommandRequest, phases: Sequence[tuple[str, float]], total: float) -> None:
    """A table of phases, with what none of them explains."""
    screen = request.screen
    named = note_phases(screen, phases, total)
    explained = seconds_of(named)
    rows: list[Sequence[Cell]] = [(name, seconds * 1e3, f"{seconds / total:.1%}") for name, seconds in named]
    other = max(0.0, total - explained)
    rows += [("other", other * 1e3, f"{other / total:.1%}"), ("all", total * 1e3, "100%")]
    screen.table("phases", ("phase", "ms", "share"), rows)


def note_phases(screen: Screen, phases: Sequence[tuple[str, float]], total: float) -> list[tuple[str, float]]:
    """The phases that have a name, which are facts, too."""
    named = [(name, seconds) for name, seconds in phases if name != "other"]
    screen.facts["phases"] = [{"name": name, "seconds": seconds} for name, seconds in named]
    screen.facts |= {"seconds": total, "explained": seconds_of(named) / total}
    return named


def kernel_facts(kernel: KernelRecord, with_source: bool) -> dict[str, Json]:
    """A kernel for the JSON file."""
    facts: dict[str, Json] = {
        "name": kernel.name,
        "ops": [str(op) for op in kernel.ops],
        "bytes_moved": kernel.bytes_moved,
        "bytes_lower_bound": kernel.bytes_lower_bound,
        "flops": kernel.flops,
        "exps": kernel.exps,
        "modelled_us": microseconds(kernel),
        "boundary": kernel.boundary.value,
        "reason": kernel.reason,
    }
    return facts | ({"source": kernel.source} if with_source else {})


def call_facts(call: CallRecord) -> dict[str, Json]:
    """A call for the JSON file."""
    return {
        "name": call.name, "ops": list(call.ops), "how": call.how, "reason": call.reason, "results": list(call.results),
        "bytes_moved": call.bytes_moved, "flops": call.flops, "exps": call.exps, "modelled_us": microseconds(call),
    }  # fmt: skip


def microseconds(record: WorkRecord) -> float | None:
    """What the model gives one launch or call."""
    return None if record.seconds is None else 1e6 * record.seconds


# The verbs.


def compile_model(
    request: CommandRequest, output: str | None, weights: str, targets: Sequence[str] = ()
) -> int:
    """`compile`: coverage and phases, a first run among them; in JSON the kernels and the plan too. The file `output`
    keeps what was compiled, with code for `targets`."""
    if output is not None:
        check_output(Path(output))
    elif targets:
        raise InputError("--target says what a file has code for", phase="cli", hint="name it: -o FILE.tw")
    if targets:
        known_targets(targets)
    with request.progress(f"compiling {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        compiled, _ = compiled_and_run(request, model, chosen.inputs)
    screen, clock = request.screen, request.screen.clock
    show_compiled(request, compiled)
    graphs = compiled.compilations
    if screen.json_path is not None:  # kernels from the cache are scheduled and printed for it
        screen.facts["kernels"] = [kernel_facts(k, True) for g in graphs for k in g.kernels]
        plan = result_of(graphs[-1], "plan") if graphs else None
        if isinstance(plan, Plan):
            screen.facts["plan"] = to_json(plan)
    clock.until_now("show")
    if output is not None:
        with request.progress(f"writing {output}"):
            importlib.import_module("tilewright.keep.saving").save(
                compiled, output, weights=weights, targets=targets
            )
        bytes_written = Path(output).stat().st_size
        screen.line(f"kept in {output} ({size(bytes_written)})")
        screen.facts |= {"output": output, "output_bytes": bytes_written}
        clock.until_now("save")
    show_phases(request, clock.phases, clock.seconds)
    return ExitCode.OK


def known_targets(names: Sequence[str]) -> None:
    """Raise InputError for a name that is no machine's, before anything is compiled."""
    for name in names:
        preset(name)


def check_output(path: Path) -> None:
    """Raise InputError for a file that could not be written, before any work is done."""
    if path.suffix != ARTIFACT:
        raise InputError(
            f"{path} is no name of an artifact", phase="cli", op="-o", hint=f"end it in {ARTIFACT}"
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        hint = "name a file in a folder that exists and that you may write to"
        raise InputError("the file cannot be written", phase="cli", op="-o", place=str(path), hint=hint)


def run_model(request: CommandRequest, save: str | None) -> int:
    """`run`: one call, a line per output; `save` is a folder for `.npy` files."""
    with request.progress(f"running {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        compiled, outputs = compiled_and_run(request, model, chosen.inputs)
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
    clock = request.screen.clock
    clock.until_now("show")
    note_phases(request.screen, clock.phases, clock.seconds)
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
            np.save(folder / f"{i}.npy", tensor.detach().cpu().numpy(), allow_pickle=False)
    except (OSError, TypeError) as error:
        hint = "name a folder that exists, or that can be made"
        raise InputError(
            f"cannot write outputs: {error}", phase="cli", place=str(folder), hint=hint
        ) from error
