"""What optimizers take off one keeps its digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.normal_graph import capture
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import NARROW, build, print_triton
from torch import Tensor, nn

import tilewright
from tilewright.ir.dtype import f64
from tilewright.ir.expr import walk
from tilewright.ir.graph import Graph
from tilewright.rewrite.normal.wide_powers import widen_powers
from tilewright.target import PRESETS


def doubles(graph: Graph) -> int:
    return sum(
        op.expr is not None and any(e.dtype is f64 for b in op.expr.body for e in walk(b)) for op in graph.ops
    )


@pytest.mark.parametrize(("f", "wide"), [
    (lambda n: 1 - 0.999**n, 1), (lambda n: 0.999**n - 1, 1), (lambda n: (1 - 0.9**n, 1 - 0.999**n), 2),
    (lambda n: 1 + 0.999**n, 0), (lambda n: 1 - n**2.5, 0), (lambda n: 1 - n, 0),
])  # fmt: skip
def test_differences_of_a_number_and_a_power(f: Callable[[Tensor], object], wide: int) -> None:
    graph = capture(f, [torch.tensor(3.0)])
    assert doubles(graph) == 0 and doubles(widen_powers(graph)) == wide
    many = capture(f, [torch.ones(3)])
    assert doubles(widen_powers(many)) == 0


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_gpus_have_powers_of_doubles(machine: str, tmp_path: Path) -> None:
    (kernel,) = compiled(lambda n: 1 - 0.999**n, [torch.tensor(3.0)], machine=machine).kernels
    source = print_triton(kernel.program, (), PRESETS[machine], NARROW, "k0")
    assert (
        "pow(tl.full((), 0.999, tl.float64)" in source.text
        and build(tmp_path, source, machine).facts.spills == 0
    )


def test_a_first_step_of_adamw() -> None:
    """Compiled, torch itself errs by 1e-5 of the step."""
    nets = [nn.Linear(5, 7, dtype=t) for t in (torch.float32, torch.float32, torch.float64)]
    x = torch.randn(3, 5)
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
        net(x.to(net.weight.dtype)).square().sum().backward()
    before = nets[0].weight.detach().double()
    for k, net in enumerate(nets):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
        step = torch.compile(optimizer.step, backend="tilewright") if k == 0 else optimizer.step
        step()
    ours, eager, exact = (net.weight.detach().double() - before for net in nets)
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()
    assert tilewright.stats().fallbacks == 0
