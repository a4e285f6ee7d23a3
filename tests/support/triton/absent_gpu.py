"""A function compiled for a GPU that is not here, run by the interpreter of tile programs, kernel by kernel."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from tests.support.normal_graph import Function
from tests.support.triton.harness import Job
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.environment import traced_sizes
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.interp.algebra import STORAGE
from tilewright.interp.program import run_program
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegion, ChosenRegions
from tilewright.partition.cover import partition
from tilewright.pipeline.phases import begin, phases_before, run_phases
from tilewright.pipeline.place import DevicePlace
from tilewright.pipeline.state import CompileRequest
from tilewright.pipeline.trace import PhaseRecorder
from tilewright.runtime.store.cache import ContentStore
from tilewright.schedule.solver import Solver
from tilewright.target import preset


@dataclass(frozen=True)
class Device:
    """The kernels of a function, in order."""

    graph: Graph
    cover: Cover
    kernels: list[Scheduled]
    regions: tuple[ChosenRegion, ...]
    symbols: tuple[str, ...]

    def sizes(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        """The values of symbols."""
        found: dict[str, int] = {}
        for v, t in zip(self.graph.inputs, inputs, strict=True):
            for e, n in zip(v.shape if isinstance(v, Value) else (), t.shape, strict=True):
                if dims.symbols_of(e):
                    found[repr(e)] = n
        return found

    def run(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Job]]:
        """The results, and each kernel with what it was given."""
        sizes = self.sizes(inputs)
        known = {v: _flat(t) for v, t in zip(self.graph.inputs, inputs, strict=True) if isinstance(v, Value)}
        known |= {v: _flat(t) for v, t in self.cover.graph.constants.items() if isinstance(t, Tensor)}
        jobs: list[Job] = []
        for k in self.kernels:
            given = [known.get(v) if v not in k.kernel.outputs else None for v in k.params]
            jobs.append(Job(k.program, given, sizes, self.symbols))
            made = run_program(k.program, given, sizes)
            known |= {v: a for v, a in zip(k.params, made, strict=True) if v in k.kernel.outputs}
        results: list[Tensor] = []
        for v in self.graph.outputs:
            assert isinstance(v, Value)
            shape = [dims.evaluate(e, sizes) for e in v.shape]
            layout = self.cover.layouts.get(v)
            strides = [
                dims.evaluate(e, sizes) for e in (layout.strides if layout else dims.dense_strides(v.shape))
            ]
            flat = _tensor(known[v])
            results.append(torch.as_strided(flat, shape, strides))
        return results, jobs


def _flat(t: Tensor) -> np.ndarray:
    """What memory holds, in its order."""
    order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
    whole = t.permute(order).contiguous().reshape(-1)
    if t.dtype is torch.bfloat16:  # numpy has no such type of its own
        return whole.view(torch.int16).numpy().view(STORAGE["bf16"])
    return whole.numpy()


def _tensor(a: np.ndarray) -> Tensor:
    if a.dtype == STORAGE["bf16"]:
        return torch.from_numpy(np.ascontiguousarray(a).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(a))


def compiled(
    function: Callable[..., object], inputs: Sequence[Tensor], dynamic: Sequence[Sequence[int]] = (),
    launch: float = 1e-6, machine: str = "sm_90", **options: str | int,
) -> Device:  # fmt: skip
    """The kernels of a function for inputs like these on a `machine`; per input, the `dynamic` dims may change.
    `launch` are the seconds that each kernel costs besides its work."""
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    gm = trace(module, inputs, dynamic or [()] * len(inputs)).gm
    given = Options(**({"contractions": "inside"} | options))  # pyright: ignore[reportArgumentType]
    solver = Solver(replace(preset(machine), launch_seconds=launch), given)
    captured, recorder = from_fx(gm), PhaseRecorder()
    asked = CompileRequest(
        recorder, given, DevicePlace("cuda:0"), (), SizeHints(traced_sizes(gm)), cast(Any, None)
    )
    phases = [phase for phase in phases_before("partition") if phase.name != "loops"]
    state = run_phases(begin(asked, captured, solver, ContentStore(None)), phases)
    cover = partition(state.graph, state.solver.price, state.solver.hints)
    assert all(isinstance(step, Kernel) for step in cover.steps), "a library call is left"
    kernels = [state.solver.solve(step, cover.layouts) for step in cover.steps if isinstance(step, Kernel)]
    mapped = recorder.trace["map"]
    assert isinstance(mapped, ChosenRegions)
    symbols = tuple(sorted(map(str, state.graph.symbols())))
    return Device(captured, cover, kernels, mapped.regions, symbols)
