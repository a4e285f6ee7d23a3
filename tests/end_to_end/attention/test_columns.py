"""Kernels of statistics over columns on a GPU: what they leave out, and what an element costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from benchmarks.attention.workloads import WORKLOADS, Sizes
from tests.end_to_end.attention.split_keys import inner
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.harness import build, interpret, print_triton, same_as_interpreter
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import accuracy
from tilewright.analysis.predicate import constant_under
from tilewright.ir.dtype import f32
from tilewright.ir.expr import axes_of, const
from tilewright.lower.variants import variants
from tilewright.target import preset


def cores(name: str, length: int, depth: int) -> tuple[Device, list[torch.Tensor]]:
    given = list(Sizes(length, 2, depth).inputs(name, layout="bhsd"))
    return compiled(WORKLOADS[name]("bhsd").eval(), given), given


@pytest.mark.parametrize("name", ["h2o", "corm", "keyformer"])
def test_columns_start_at_the_diagonal(name: str) -> None:
    made, _ = cores(name, 1024, 64)
    (columns,) = [k for k in made.kernels if len(k.kernel.outputs) == 1]
    loops = inner(columns.program.body)
    assert loops and all(axes_of(s.start) for s in loops), "no loop starts with the first query"


def test_any_of_what_is_hidden_is_false() -> None:
    """A probability 0 is not at least a positive number; that the number is one follows from its interval."""
    made, _ = cores("corm", 256, 64)
    (columns,) = [k for k in made.kernels if len(k.kernel.outputs) == 1]
    text = print_triton(columns.program, (), preset("sm_90"), variants(columns.program)[0], "k0").text
    assert "tl.int1" not in text and text.count("tl.reduce") == 1
    assert constant_under(const(0.0, f32), {}) == 0.0


@pytest.mark.parametrize("name", ["corm", "keyformer"])
def test_results(name: str, tmp_path: Path) -> None:
    made, given = cores(name, 160, 32)
    module = WORKLOADS[name]("bhsd").eval()
    results, jobs = made.run(given)
    with torch.no_grad():
        eager, exact = module(*given), accuracy.in_float64(module)(*given)
    for ours, e, r in zip(results, eager, exact, strict=True):
        if e.dtype is torch.bool:
            assert (ours != e).float().mean() < 0.01
        else:
            verdict = accuracy.compare(ours, e, r)
            assert verdict.passed, verdict
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)


def test_machine_code_takes_functions_of_one_instruction(tmp_path: Path) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = list(Sizes(4096, 32, 128).inputs("keyformer", layout="bhsd"))
        made = compiled(WORKLOADS["keyformer"]("bhsd").eval(), given)
    assert len(made.kernels) == 2
    logarithms = 0
    for n, k in enumerate(made.kernels):
        source = print_triton(k.program, (), preset("sm_90"), variants(k.program)[0], "k0")
        built = build(tmp_path / str(n), source)
        assert not built.facts.spills
        powers = re.findall(r"ex2\.approx(\.ftz)?\.f32", built.text)
        assert 4 * powers.count("") < powers.count(".ftz"), "others are done once a row"
        logarithms += "quick_log2(" in source.text and "lg2.approx.f32" in built.text
    assert logarithms
