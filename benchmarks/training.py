"""`python -m benchmarks.training`: forward and backward under bf16 autocast, beside eager and Inductor.

Each network is a child process; children build side by side and time alone (`gpu_turns`). A step sets the gradients to
None, runs the compiled network, a loss outside of it, and the backward pass; it is timed between two events, all
contestants in turn. `peak_bytes` is what a step needs above the weights, with all that is kept between steps.
Gradients are judged against the same step in float64: the RMS error of all of them together, and the largest ratio to
eager's error over all parameters.
"""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import gpu_clock, gpu_turns, record
from benchmarks.gpu_models import NETWORKS, Only
from benchmarks.record import Facts
from tilewright import measure

BATCH = 64
CHECKED = 8
"""Images or sequences of the step that is judged: its float64 version must fit."""
LABELS = 1000
ROWS, WIDTH = 16384, 4096
"""Of the network that is two norms."""

EAGER, INDUCTOR, REDUCED, AUTOTUNED = (
    "eager", "inductor", "inductor reduce-overhead", "inductor max-autotune"
)  # fmt: skip
OURS, GRAPHS = "tilewright", "tilewright cuda_graphs"
CONTESTANTS = (EAGER, INDUCTOR, REDUCED, AUTOTUNED, OURS, GRAPHS)

Step = Callable[[], Tensor]


class TwoNorms(nn.Module):
    """A layer norm, a GELU, a layer norm: nothing but memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, WIDTH] to the same."""
        return self.second(F.gelu(self.first(x)))


@dataclass(frozen=True)
class Task:
    """A network in training mode, and its input for a number of images, sequences or rows."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.device], Tensor]
    batch: int = BATCH
    images: bool = False
    checked: int = CHECKED


def _pixels(batch: int, device: torch.device) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)


def _network(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        reasons: list[str] = []
        for source, build in NETWORKS[name].sources:
            try:
                return build()
            except Exception as error:  # noqa: BLE001 - the next source may have it
                reasons.append(f"{source}: {measure.one_line(error)}")
        raise LookupError("; ".join(reasons))

    return make


def _llama() -> nn.Module:
    package = importlib.import_module("transformers")
    settings = package.LlamaConfig(
        hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=5504, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return Only(package.LlamaModel(settings), "input_ids", "last_hidden_state")


def _ids(length: int, vocabulary: int) -> Callable[[int, torch.device], Tensor]:
    return lambda batch, device: torch.randint(0, vocabulary, (batch, length), device=device)


def _rows(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "resnet50": Task(_network("resnet50"), _pixels, images=True),
        "convnext_tiny": Task(_network("convnext_tiny"), _pixels, images=True),
        "bert_base": Task(_network("bert_base"), _ids(128, 30522)),
        "vit_small_patch32": Task(_network("vit_small_patch32"), _pixels),
        "llama_4x2048": Task(_llama, _ids(1024, 32000), batch=4, checked=1),
        "two_norms": Task(TwoNorms, _rows, batch=ROWS, checked=512),
    }
)


def loss_of(out: Tensor) -> Tensor:
    """A loss that needs no labels and is not symmetric in anything."""
    wide = out.float()
    if wide.dim() == 2 and wide.shape[1] == LABELS:
        return F.cross_entropy(wide, torch.arange(len(wide), device=wide.device) % LABELS)
    weights = torch.linspace(-1, 1, wide.shape[-1], device=wide.device)
    return (wide * weights).square().mean()


def step_of(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Step:
    """One forward and backward pass of `call`, which is `model` or its compiled form."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = call(x)
        loss = loss_of(out)
        loss.backward()
        return loss.detach()

    return step


def compiled(name: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The contestant's form of `model`."""
    ours = importlib.import_module("tilewright").backend
    match name:
        case "eager":
            return model
        case "inductor":
            return torch.compile(model)
        case "inductor reduce-overhead":
            return torch.compile(model, mode="reduce-overhead")
        case "inductor max-autotune":
            return torch.compile(model, mode="max-autotune")
        case "tilewright":
            return torch.compile(model, backend=ours)
        case _:
            return torch.compile(model, backend=ours, options={"cuda_graphs": True})


# --- one network, in a process of its own --------------------------------------------


def hold_workspaces(device: torch.device) -> None:
    """Have torch allocate the workspaces of its products in both passes, which it keeps: graphs of a contestant give
    them back, and the next one would seem to need them, as the first one does."""
    x = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    (F.linear(x, x, x[0]) @ x).sum().backward()


class Run:
    """One network and its contestants."""

    def __init__(self, item: str, device: torch.device, path: Path, small: int) -> None:
        self.task = TASKS[item]
        self.device, self.path = device, path
        self.batch = small or self.task.batch
        torch.manual_seed(0)
        self.model = self.task.make().train().to(device)
        if self.task.images:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.rows: dict[str, Facts] = {}
        self.facts: Facts = {"batch": self.batch, "rows": self.rows}

    def write(self, phase: str) -> None:
        """The figures so far."""
        record.write_json(self.path, self.facts | {"phase": phase})

    def build(self, names: tuple[str, ...]) -> dict[str, Step]:
        """Each contestant's step, run a few times."""
        steps: dict[str, Step] = {}
        x = self.task.inputs(self.batch, self.device)
        for name in names:
            mine = copy.deepcopy(self.model)
            hold_workspaces(self.device)
            step = step_of(compiled(name, mine), mine, x.detach().clone().requires_grad_(x.requires_grad))
            start, before = time.perf_counter(), self.allocated()
            try:
                for _ in range(4):
                    step()
                gpu_clock.synchronize(self.device)
            except Exception as error:  # noqa: BLE001 - one contestant's failure must not stop the others
                self.rows[name] = {"failed": measure.one_line(error)}
                self.write(gpu_turns.BUILDING)
                continue
            seconds = time.perf_counter() - start
            self.rows[name] = {"build_s": seconds, "peak_bytes": self.peak(name, step, mine, before)}
            if name in (OURS, GRAPHS):
                self.rows[name] |= {
                    "graphs": [str(c) for c in importlib.import_module("tilewright").compilations()]
                }
            steps[name] = step
            self.write(gpu_turns.BUILDING)
        return steps

    def allocated(self) -> int:
        """Bytes in use on the device."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def peak(self, name: str, step: Step, model: nn.Module, before: int) -> int | None:
        """Bytes that a step needs above those that were in use `before` the contestant was built."""
        if self.device.type != "cuda" or name in (REDUCED, AUTOTUNED):
            return None  # what lies in pools of graphs is not counted
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def check(self, names: tuple[str, ...]) -> None:
        """Gradients beside float64's, without dropout and at a small batch."""
        model = copy.deepcopy(self.model)
        for module in model.modules():
            if "Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
                for name in {"p", "drop_prob"} & vars(module).keys():
                    setattr(module, name, 0.0)
        x = self.task.inputs(self.task.checked, self.device)
        exact = gradients(model.double(), x.double() if x.is_floating_point() else x, EAGER, autocast=False)
        model = model.float()
        eager = gradients(copy.deepcopy(model), x, EAGER)
        for name in names:
            if "failed" not in self.rows.get(name, {}):
                found = eager if name == EAGER else gradients(copy.deepcopy(model), x, name)
                self.rows.setdefault(name, {})["gradients"] = errors(found, eager, exact)

    def time(self, steps: Mapping[str, Step], rounds: int) -> None:
        """Medians between events, contestants in turn."""
        if self.device.type == "cuda":
            samples = gpu_clock.events(steps, rounds, torch.compiler.cudagraph_mark_step_begin)
            for name, seconds in samples.items():
                self.rows[name] |= {"step_ms": measure.Timing(tuple(seconds)).median * 1e3}
            return
        for name, timing in gpu_clock.wall_clock(steps, self.device, rounds).items():
            self.rows[name] |= {"step_ms": timing.median * 1e3}


def gradients(model: nn.Module, x: Tensor, name: str, *, autocast: bool = True) -> dict[str, Tensor]:
    """Of all parameters and of `x`, after one step."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    call = compiled(name, model)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
        out = call(x)
    wide = out.double() if not autocast else out
    loss = loss_of(wide) if autocast else _exact_loss(wide)
    loss.backward()
    found = {n: p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
    return found | ({"input": x.grad.detach()} if x.grad is not None else {})


def _exact_loss(out: Tensor) -> Tensor:
    if out.dim() == 2 and out.shape[1] == LABELS:
        return F.cross_entropy(out, torch.arange(len(out), device=out.device) % LABELS)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device).double()
    return (out * weights).square().mean()


def errors(found: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Facts:
    """RMS(g - r) / RMS(r) of all gradients together, and the largest RMS(g - r) / (RMS(e - r) + u RMS(r)) of one, where
    e is eager's and u the rounding of bf16."""
    if found.keys() != exact.keys():
        return {"failed": f"gradients of {sorted(exact.keys() ^ found.keys())}"}
    squares = {n: (_square(found[n] - r), _square(eager[n] - r), _square(r)) for n, r in exact.items()}
    rounding = torch.finfo(torch.bfloat16).eps / 2
    ratios = {
        n: (y / max((e**0.5 + rounding * r**0.5) ** 2, 1e-300)) ** 0.5 for n, (y, e, r) in squares.items()
    }
    worst = max(ratios, key=lambda n: ratios[n])
    whole = (sum(y for y, _, _ in squares.values()) / sum(r for _, _, r in squares.values())) ** 0.5
    return {"whole": whole, "worst_of_eager": ratios[worst], "worst": worst}


def _square(t: Tensor) -> float:
    return float(t.double().square().sum())


def profiled(step: Step) -> list[Facts]:
    """Device time of the 40 longest kinds of kernels in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kinds = [e for e in seen.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    kinds.sort(key=lambda e: -e.self_device_time_total)
    return [{"kernel": e.key[:90], "count": e.count, "us": e.self_device_time_total} for e in kinds[:40]]


def hosted(step: Step) -> list[str]:
    """Where the host spends its time in ten steps, backward passes on the caller's thread: the 30 longest functions."""
    import cProfile
    import io
    import pstats

    profiler, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profiler.enable()
        for _ in range(10):
            step()
        profiler.disable()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
    return [line[:150] for line in text.getvalue().splitlines() if line.strip()]


def run_child(item: str, path: Path, turns: gpu_turns.Turns, wanted: Mapping[str, object]) -> None:
    """Build, check and time one network."""
    device = torch.device(str(wanted["device"]))
    torch._dynamo.config.recompile_limit = 64  # every contestant compiles the same code
    names = tuple(str(wanted["contestants"]).split(","))
    with turns.building():
        run = Run(item, device, path, int(str(wanted["small"])))
        steps = run.build(names)
        if wanted["check"]:
            run.check(tuple(n for n in names if n in (EAGER, OURS, GRAPHS)))
        run.write(gpu_turns.BUILDING)
    run.write(gpu_turns.TIMING)
    with turns.timing():
        run.time(steps, int(str(wanted["rounds"])))
        if wanted["profile"]:
            run.facts["profiles"] = {n: profiled(s) for n, s in steps.items()}
            run.facts["host"] = {n: hosted(s) for n, s in steps.items()}
    run.write(gpu_turns.DONE)


# --- all of them -----------------------------------------------------------------------


def _table(found: Mapping[str, Facts]) -> Table:
    table = Table(title="forward and backward, ms (peak GiB)", title_justify="left")
    table.add_column("network")
    for name in CONTESTANTS:
        table.add_column(name, justify="right")
    for item, facts in found.items():
        rows: Mapping[str, Facts] = facts.get("rows", {})  # type: ignore[assignment]
        table.add_row(item, *(_cell(rows.get(name, {})) for name in CONTESTANTS))
    return table


def _cell(row: Facts) -> str:
    if "failed" in row:
        return "failed"
    if "step_ms" not in row:
        return ""
    peak = row.get("peak_bytes")
    return f"{row['step_ms']:.2f}" + (f" ({peak / 2**30:.1f})" if isinstance(peak, int) else "")


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--networks", default=",".join(TASKS), show_default=True)
@click.option("--contestants", default=",".join(CONTESTANTS), show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--small", default=0, help="another batch size, for a try")
@click.option("--check/--no-check", default=True, show_default=True, help="judge gradients")
@click.option("--profile", is_flag=True, help="list the longest kernels of each contestant")
@click.option("--budget", default=500.0, show_default=True, help="seconds for everything")
@click.option("--jobs", default=6, show_default=True, help="children at once")
@click.option("--child", hidden=True)
@click.option("--child-json", hidden=True, type=click.Path(path_type=Path))
@click.option("--turns", hidden=True, type=click.Path(path_type=Path))
@click.option("--build-until", hidden=True, type=float)
def main(path: Path | None, networks: str, budget: float, jobs: int, child: str | None, child_json: Path, turns: Path,
         build_until: float | None, **wanted: object) -> None:  # fmt: skip
    """Run all networks and print one table."""
    warnings.filterwarnings("ignore")
    del build_until
    if child:
        run_child(child, child_json, gpu_turns.Turns(turns), wanted)
        return
    arguments: list[str] = []
    for name, value in wanted.items():
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else (["--no-check"] if name == "check" else [])
        else:
            arguments += [f"--{name}", str(value)]
    facts = record.provenance(0)

    def report(found: Mapping[str, Facts]) -> None:
        if path is not None:
            record.write_json(path, facts | {"networks": dict(found)})

    limits = gpu_turns.Limits(budget * 0.8, budget)
    found = gpu_turns.run("benchmarks.training", networks.split(","), arguments, limits, jobs, report)
    (Console() if Console().is_terminal else Console(width=160)).print(_table(found))


if __name__ == "__main__":
    main()
