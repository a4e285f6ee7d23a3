"""Writes into inputs on a GPU, on a machine without one: where values lie, and what the text does before it stores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.pipeline.test_compiler_cuda import Nowhere, compiled, needs_triton, traced
from torch import Tensor, fx

from tilewright.pipeline.backends import cuda
from tilewright.plan import Copy
from tilewright.runtime.plan.executable import Executable
from tilewright.target import preset

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_target", lambda ordinal: preset("sm_90"))
    monkeypatch.setattr(cuda, "driver_device", lambda *_: Nowhere())


def grown(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The new value of x, and a result."""
    return x * 0.9 + y, y * 2


def line(cache: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The new value of the cache, and a result."""
    made = torch.select_scatter(cache, k * 2, 1, 5)
    return made, made.sum(-1)


def written(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph whose first result is written into its first input. (No such copy can be traced here.)"""
    (output,) = gm.graph.find_nodes(op="output")
    (first, *_) = gm.graph.find_nodes(op="placeholder")
    (new, *rest) = output.args[0]
    with gm.graph.inserting_before(output):
        copy = gm.graph.call_function(torch.ops.aten.copy_.default, (first, new))
    copy.meta["val"] = first.meta["val"]
    output.args = (rest,)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("program", "shapes", "waits"),
    [(grown, ((300, 70), (300, 70)), True), (line, ((4, 64, 128), (4, 128)), False)],
)
def test_a_gpu_stores_in_place(
    program: Callable[..., tuple[Tensor, Tensor]], shapes: tuple[tuple[int, ...], ...], waits: bool
) -> None:
    """Threads of a block may hold copies of what is loaded: all have loaded before one stores over it."""
    done = compiled(written(traced(program, *shapes)))
    assert isinstance(done.executable, Executable)
    plan = done.executable.plan
    assert plan.writes == ((0, ""),) and plan.changed == (0,)
    assert not any(isinstance(step, Copy) for segment in plan.segments for step in segment.steps)
    sources = [k.source for k in done.compilation.kernels]
    assert (
        any("tl.debug_barrier()\n    tl.store(" in text.replace("        ", "    ") for text in sources)
        is waits
    )
