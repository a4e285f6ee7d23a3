"""`python -m benchmarks.report_page --json FILE`: how large a report of 2,000 kernels is, how long it takes to write,
and how long a browser takes to show it.

The facts are synthetic: a chain of blocks with residual edges, each kernel with a source of its own. The page is opened
in a headless Chromium, each time in a profile of its own; loaded is the time until its first frame is drawn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.browser import Browser, browser, chromium

from benchmarks import record
from benchmarks.record import Facts
from tilewright.report.facts import (
    EdgeFacts,
    GraphFacts,
    LevelFacts,
    MachineFacts,
    PhaseFacts,
    ReportFacts,
    StepFacts,
)
from tilewright.report.page import page

OPS = ("mul", "add", "gelu", "softmax", "layer_norm", "sum", "exp", "where", "rsqrt", "cat")
MAX_BYTES = 5 << 20
MAX_SECONDS = 2.0
FRAMES = 60

FLUENCY = """new Promise(done => {
  const canvas = document.querySelector("canvas"), times = [];
  canvas.focus();
  let last = null, left = %d;
  const step = now => {
    if (last !== null) times.push(now - last);
    last = now;
    canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: left %% 2 ? 90 : -80, bubbles: true, cancelable: true}));
    if (left-- > 0) requestAnimationFrame(step); else done(times);
  };
  requestAnimationFrame(step);
})"""
"""Milliseconds between frames while the graph is zoomed in each of them."""


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


def opened(view: Browser, file: Path) -> Facts:
    """Seconds until it is shown, milliseconds between frames while it is zoomed, and what the browser complains of."""
    seconds = view.open(file)
    between: list[float] = view.evaluate(FLUENCY % FRAMES)
    return {
        "load_seconds": round(seconds, 3),
        "frame_ms": round(statistics.median(between), 1),
        "slowest_frame_ms": round(max(between), 1),
        "complaints": list(view.errors),
    }


def measured(kernels: int, times: int) -> Facts:
    """Size and times of one page."""
    facts = synthetic(kernels)
    start = time.perf_counter()
    text = page(facts)
    written = time.perf_counter() - start
    opens: list[Facts] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        for _ in range(times if chromium() else 0):
            with browser() as view:
                opens.append(opened(view, file))
    return {
        "kernels": kernels,
        "bytes": len(text.encode()),
        "write_seconds": round(written, 3),
        "opens": opens,
    }


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measured(arguments.kernels, arguments.times)
    opens = found["opens"]
    assert isinstance(opens, list)
    loads = [float(o["load_seconds"]) for o in opens if isinstance(o, dict)]  # type: ignore[arg-type]
    size = found["bytes"]
    assert isinstance(size, int)
    print(
        f"{arguments.kernels} kernels: {size / 2**20:.2f} MiB (at most 5), written in {found['write_seconds']} s"
    )
    if loads:
        print(f"loads in {statistics.median(loads):.2f} s (at most {MAX_SECONDS}); {opens}")
    found |= {"fits": size <= MAX_BYTES, "loads": bool(loads) and statistics.median(loads) <= MAX_SECONDS}
    if arguments.json:
        record.write_json(arguments.json, {**record.provenance(1), "page": found})


if __name__ == "__main__":
    main()
