"""Facts of a report that nothing was compiled for: a chain of kernels and calls with residual edges."""

from __future__ import annotations

import random
from dataclasses import replace

from tilewright.report.facts import (
    EdgeFacts,
    GraphFacts,
    LevelFacts,
    MachineFacts,
    PhaseFacts,
    ReportFacts,
    StepFacts,
)

OPS = ("mul", "add", "gelu", "softmax", "layer_norm", "sum", "exp", "where", "rsqrt", "cat")


def synthetic(kernels: int, *, seed: int = 0, name: str = "synthetic") -> ReportFacts:
    """Facts of so many kernels and calls, the same for the same seed."""
    dice = random.Random(seed)
    steps: list[StepFacts] = []
    sources: list[str] = []
    for k in range(kernels):
        call = dice.random() < 0.15
        moved = int(dice.lognormvariate(13, 2)) + 64
        flops = int(moved * dice.lognormvariate(1 if call else -1, 1))
        modelled = max(moved / 40e9, flops / 500e9) * dice.uniform(1, 2) + 1e-6
        ops = tuple(f"aten.{dice.choice(OPS)}" for _ in range(1 if call else dice.randint(1, 9)))
        steps.append(
            StepFacts(
                name="aten.addmm" if call else f"k{k}",
                how="choice" if call else "generated",
                ops=ops,
                bytes_moved=moved,
                bytes_lower_bound=int(moved / dice.uniform(1, 1.5)),
                flops=flops,
                exps=flops // 50,
                modelled=modelled,
                measured=modelled * dice.lognormvariate(0, 0.4),
                boundary="" if call else "separate kernels are faster",
                reason="contraction" if call else "separate kernels are faster: 12.1 us against 13.9 us",
                schedule=""
                if call
                else f"r0=parallel[{dice.randint(1, 64)}] r1=vector[16] r2=sequential[256]",
                source=None if call else len(sources),
                results=("f32[64, 256]",) if call else (),
                kept=len(ops) - 1,
                kept_bytes=moved * (len(ops) - 1),
            )  # fmt: skip
        )
        if not call:
            sources.append(_source(k, dice))
    edges = [EdgeFacts(None, 0, "input 0: f32[64, 256]", 65536, "device")]
    for k in range(1, kernels):
        edges.append(EdgeFacts(k - 1, k, "f32[64, 256]", steps[k].bytes_moved, "device"))
        if k % 9 == 0:
            edges.append(EdgeFacts(k - 9, k, "f32[64, 256]", 65536, "device"))
    edges.append(EdgeFacts(kernels - 1, None, "f32[64, 256]", 65536, "device"))
    graph = GraphFacts(
        title="inference", kind="inference", coverage=f"generated {kernels} of {kernels} ops", sizes=("s0 = 64",),
        machine=MachineFacts("x86-64-v4", 40e9, 120e9, 500e9), steps=tuple(steps), edges=tuple(edges),
        levels=(LevelFacts("DEVICE", len(edges), sum(s.bytes_moved or 0 for s in steps)),),
        phases=tuple(PhaseFacts(n, dice.uniform(0.01, 9)) for n in ("trace", "partition", "schedule", "build")),
        live_bytes=tuple(dice.randint(1 << 16, 1 << 22) for _ in steps), intermediate_bytes=1 << 22,
    )  # fmt: skip
    return ReportFacts(
        name, "2026-01-01 00:00 UTC", (("cpu", "none"), ("torch", "2.13.0")), (graph,), tuple(sources)
    )


def _source(k: int, dice: random.Random) -> str:
    lines = [f'extern "C" void k{k}(const float* __restrict a, float* __restrict b, int64_t n) {{']
    lines += [
        f"  const vec16 t{i} = fma(load(a + {dice.randint(0, 9999)}), t{max(0, i - 1)}, splat({dice.random():.6f}f));"
        for i in range(40)
    ]
    return "\n".join([*lines, "}"])


def hostile(name: str) -> ReportFacts:
    """Facts in which each text is this one."""
    facts = synthetic(4)
    (graph,) = facts.graphs
    steps = tuple(
        replace(
            s,
            name=name,
            ops=(name, name),
            reason=name,
            boundary=name,
            schedule=name,
            results=(name,),
            notes=(name,),
        )
        for s in graph.steps
    )
    edges = tuple(replace(e, tensor=name, level=name) for e in graph.edges)
    graph = replace(
        graph, title=name, coverage=name, sizes=(name,), steps=steps, edges=edges, regions=(name,),
        phases=tuple(replace(p, name=name) for p in graph.phases),
        levels=tuple(replace(x, name=name) for x in graph.levels),
    )  # fmt: skip
    return replace(facts, title=name, graphs=(graph,), sources=(name,) * len(facts.sources))
