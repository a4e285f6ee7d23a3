"""`python -m benchmarks.compile_work`: how much work it is to choose the kernels of whole networks, what the work is,
and what is chosen.

Each case has a process of its own with empty caches. Nothing is built, and nothing is timed on a device: kernels are
chosen by the model of the machine (`--machine host` is this CPU, any other one is a GPU's preset). Seconds are those of
a processor. `priced` counts kernels that a price was asked of, `solved` those that it was sought for, `forms` and
`lowered` the forms and tile programs that were made; `chosen` is equal for runs that chose the same schedules and tile
programs.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import tilewright
from benchmarks import record
from benchmarks.gpu_compile import (
    BUILDING,
    NO_EXECUTABLE,
    TORCH,
    WANTED_SECONDS,
    Unrun,
    elsewhere,
    longest_phases,
)
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.record import Facts, Json
from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.kernel import Kernel, Scheduled
from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.backends import cpu, cuda
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.schedule import solver as solver_module
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Layouts, Solver
from tilewright.target import Target

Made = tuple[nn.Module, tuple[Tensor, ...]]
HOST, STEP = "host", " step"


class Called(nn.Module):
    """A model that is called by keywords, and returns one of its results."""

    def __init__(self, model: nn.Module, keywords: Sequence[str], result: str) -> None:
        super().__init__()
        self.model, self.keywords, self.result = model, tuple(keywords), result

    def forward(self, *inputs: Tensor) -> Tensor:
        """`inputs` are those of the keywords, in order."""
        return getattr(self.model(**dict(zip(self.keywords, inputs, strict=True))), self.result)


def _transformers(name: str, inputs: Mapping[str, Tensor], **settings: object) -> Made:
    package = importlib.import_module("transformers")
    model = getattr(package, f"{name}Model")(getattr(package, f"{name}Config")(**settings))
    return Called(model, list(inputs), "last_hidden_state"), tuple(inputs.values())


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 1000, shape)


def t5() -> Made:
    """T5, small: six layers in the encoder and in the decoder."""
    return _transformers(
        "T5", {"input_ids": _ids(1, 64), "decoder_input_ids": _ids(1, 32)}, num_layers=6, use_cache=False
    )


def longformer() -> Made:
    """Attention in windows, four layers."""
    return _transformers("Longformer", {"input_ids": _ids(1, 256)}, num_hidden_layers=4, attention_window=64)


def informer() -> Made:
    """Sparse attention over time, as its configuration has it."""
    steps = 24
    inputs = {
        "past_values": torch.randn(2, steps + 7),
        "past_time_features": torch.randn(2, steps + 7, 2),
        "past_observed_mask": torch.ones(2, steps + 7),
        "future_values": torch.randn(2, 12),
        "future_time_features": torch.randn(2, 12, 2),
    }
    return _transformers(
        "Informer", inputs, prediction_length=12, context_length=steps, num_time_features=2, use_cache=False
    )


def llama() -> Made:
    """Four layers."""
    return _transformers(
        "Llama", {"input_ids": _ids(1, 128)}, hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, use_cache=False,
    )  # fmt: skip


class Residual(nn.Module):
    """Norms of groups, two convolutions, the time of a step of diffusion added between."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.first, self.second = (
            nn.Conv2d(before, after, 3, padding=1),
            nn.Conv2d(after, after, 3, padding=1),
        )
        self.time, self.short = nn.Linear(time, after), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """`x` is an image, `t` the time of each image."""
        y = self.first(nn.functional.silu(self.norm1(x))) + self.time(nn.functional.silu(t))[:, :, None, None]
        return self.short(x) + self.second(nn.functional.silu(self.norm2(y)))


class Pixels(nn.Module):
    """Attention between the pixels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, channels), channels // 8
        self.read, self.write = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is an image."""
        b, c, h, w = x.shape
        rows = self.norm(x).view(b, c, h * w).transpose(1, 2)
        q, k, v = self.read(rows).view(b, h * w, 3, self.heads, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.write(y).transpose(1, 2).view(b, c, h, w)


class UNet(nn.Module):
    """Down to an eighth and up again, with what was on the way down beside it."""

    def __init__(self, width: int = 32, time: int = 128) -> None:
        super().__init__()
        widths = [width, 2 * width, 2 * width, 4 * width]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        have, held = width, [width]
        for wide in widths:
            self.down.append(
                nn.ModuleList([Residual(have, wide, time), Residual(wide, wide, time), Pixels(wide)])
            )
            have = wide
            held += [wide, wide]
        self.middle = Residual(have, have, time)
        for wide in reversed(widths):
            blocks = [
                Residual(have + held.pop(), wide, time),
                Residual(wide + held.pop(), wide, time),
                Pixels(wide),
            ]
            self.up.append(nn.ModuleList(blocks))
            have = wide
        self.last = nn.Sequential(nn.GroupNorm(8, have), nn.SiLU(), nn.Conv2d(have, 3, 3, padding=1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """`x` are images, `step` is the step of diffusion of each."""
        rates = torch.exp(torch.arange(self.width // 2) * (-9.2 / (self.width // 2)))
        angles = step[:, None].to(x.dtype) * rates.to(x.dtype)
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.first(x)
        held: list[Tensor] = []
        for n, (one, two, attention) in enumerate(cast("list[nn.ModuleList]", list(self.down))):
            x = one(x, t)
            held.append(x)
            x = attention(two(x, t))
            held.append(x)
            x = nn.functional.avg_pool2d(x, 2) if n < len(self.down) - 1 else x
        x = self.middle(x, t)
        for n, (one, two, attention) in enumerate(cast("list[nn.ModuleList]", list(self.up))):
            x = nn.functional.interpolate(x, scale_factor=2.0) if n else x
            x = one(torch.cat([x, held.pop()], 1), t)
            x = attention(two(torch.cat([x, held.pop()], 1), t))
        return self.last(x)


def unet() -> Made:
    """A residual network down and up, with attention at each size."""
    return UNet(), (torch.randn(1, 3, 64, 64), torch.tensor([17]))


def _network(name: str) -> Callable[[], Made]:
    def make() -> Made:
        device = torch.device("cpu")
        model = load(NETWORKS[name], device, torch.float32).model
        return model, (NETWORKS[name].inputs(1, device, torch.float32),)

    return make


CASES: Mapping[str, Callable[[], Made]] = {
    **{case.__name__: case for case in (t5, unet, informer, longformer, llama)},
    **{name: _network(name) for name in NETWORKS},
}
NAMES = (*CASES, *(f"{name}{STEP}" for name in ("unet", "t5")))


@contextmanager
def here() -> Generator[list[Compiled]]:
    """Compile for this CPU; what is compiled, none of which is built or runs."""
    made: list[Compiled] = []

    def unrun(gm: fx.GraphModule, frozen: Mapping[str, Tensor], done: Compiled, options: Options) -> Compiled:
        made.append(done)
        return replace(done, executable=Unrun(gm, frozen))

    with (
        mock.patch.object(cpu, "build", lambda *given: Path(os.devnull)),
        mock.patch.object(cpu, "_loaded", lambda *given: None),
        mock.patch.object(compiler, "executable", lambda *given, **named: NO_EXECUTABLE),
        watch_compilations(unrun),
    ):
        yield made


def not_built(sources: Sequence[TritonSource], target: Target, store: ContentStore) -> list[None]:
    """Stands in for building."""
    return [None] * len(sources)


@dataclass
class Work:
    """What was done, and what came out."""

    priced: int = 0
    solved: int = 0
    forms: int = 0
    lowered: int = 0
    made: list[str] = field(default_factory=list[str])

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count meanwhile."""
        price, best, solve = Solver.price, Solver._best, Solver.solve
        make_form, lower = solver_module.make_form, solver_module.lower

        def counted_price(solver: Solver, kernel: Kernel, layouts: Layouts) -> float:
            self.priced += 1
            return price(solver, kernel, layouts)

        def counted_best(solver: Solver, *given: Any) -> Solution:
            self.solved += 1
            return best(solver, *given)

        def counted_form(*given: object, **named: object) -> object:
            self.forms += 1
            return make_form(*given, **named)  # type: ignore[arg-type]

        def counted_lower(*given: object) -> object:
            self.lowered += 1
            return lower(*given)  # type: ignore[arg-type]

        def noted(solver: Solver, kernel: Kernel, layouts: Layouts, *more: object) -> Scheduled:
            done = solve(solver, kernel, layouts, *more)  # type: ignore[arg-type]
            self.made.append(f"{done.schedule}\n{done.program}")
            return done

        with ExitStack() as stack:
            for of, name, by in (
                (Solver, "price", counted_price), (Solver, "_best", counted_best), (Solver, "solve", noted),
                (solver_module, "make_form", counted_form), (solver_module, "lower", counted_lower),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(of, name, by))
            yield


def _compile(model: nn.Module, inputs: tuple[Tensor, ...], *, both: bool) -> None:
    """Inference with frozen weights, or `both` passes of a step of training."""
    if not both:
        tilewright.compile(model, inputs, freeze=True, options={"measure": False})
        return
    compiled = torch.compile(model, backend=tilewright.backend, options={"measure": False})
    compiled(*inputs).float().square().mean().backward()


def run(case: str, machine: str) -> Facts:
    """Seconds of the phases of one case, and the work that was done, in this process."""
    torch.manual_seed(0)
    model, inputs = CASES[case.removesuffix(STEP)]()
    model = model.eval() if case.endswith(STEP) else model.eval().requires_grad_(False)
    if machine != HOST:
        model, inputs = model.half(), tuple(x.half() if x.is_floating_point() else x for x in inputs)
    work = Work()
    with ExitStack() as stack:
        if machine != HOST:
            stack.enter_context(
                mock.patch.object(cuda, "build_kernels", lambda sources, **given: [None] * len(sources))
            )
        made = stack.enter_context(here() if machine == HOST else elsewhere(machine))
        stack.enter_context(work.counting())
        start, worked = time.perf_counter(), time.process_time()
        _compile(model, inputs, both=case.endswith(STEP))
        whole, whole_work = time.perf_counter() - start, time.process_time() - worked
    phases: dict[str, float] = {}
    for done in made:
        for phase in done.trace.phases:
            phases[phase.name] = phases.get(phase.name, 0.0) + (phase.cpu_seconds or phase.seconds)
    own = sum(s for phase, s in phases.items() if phase not in (*BUILDING, *TORCH))
    return {
        "seconds": own,
        "torch_s": whole_work - own,
        "whole_s": whole,
        "phases_s": {name: phases[name] for name in sorted(phases, key=lambda name: -phases[name])},
        "graphs": [f"{done.compilation.kind}: {done.coverage}" for done in made],
        "priced": work.priced,
        "solved": work.solved,
        "forms": work.forms,
        "lowered": work.lowered,
        "kernels": len(work.made),
        "chosen": digest(*work.made),
    }


def table(cases: Mapping[str, Facts], machine: str, threads: int) -> Table:
    """One row per case."""
    result = Table(title=f"seconds to choose kernels for {machine}, {threads} threads", title_justify="left")
    result.add_column("what", no_wrap=True)
    for column in ("seconds", "torch", "priced", "solved", "forms", "lowered", "kernels"):
        result.add_column(column, justify="right")
    result.add_column("longest phases")
    for name, facts in cases.items():
        if "failed" in facts:
            result.add_row(name, str(facts["failed"])[:60])
            continue
        longest = longest_phases(facts)
        seconds, traced = (cast(float, facts[key]) for key in ("seconds", "torch_s"))
        late = " (late)" if seconds > WANTED_SECONDS else ""
        counts = [str(facts[key]) for key in ("priced", "solved", "forms", "lowered", "kernels")]
        result.add_row(name, f"{seconds:.1f}{late}", f"{traced:.1f}", *counts, ", ".join(longest))
    return result


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="some of them")
@click.option("--machine", default=HOST, show_default=True, help="what is compiled for")
@click.option("--threads", default=2, show_default=True)
@click.option("--child-json", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    path: Path | None, only: tuple[str, ...], machine: str, threads: int, child_json: Path | None
) -> None:
    """Run all processes and print one table."""
    if child_json is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        record.write_json(child_json, run(only[0], machine))
        return
    console = Console() if Console().is_terminal else Console(width=150)
    cases: dict[str, Facts] = {}
    for name in only or NAMES:
        with console.status(name):
            cases[name] = record.cold_child(
                "benchmarks.compile_work", ["--only", name, "--machine", machine], threads
            )
        if path is not None:
            facts: Mapping[str, Json] = {"machine": machine, "load": list(os.getloadavg()), "cases": cases}
            record.write_json(path, record.provenance(threads) | facts)
    console.print(table(cases, machine, threads))


if __name__ == "__main__":
    main()
