"""`python -m benchmarks.report_page --json FILE`: how large a report of 2,000 kernels is, how long it takes to write,
and how long a browser takes to show it.

The facts are synthetic: a chain of blocks with residual edges, each kernel with a source of its own. The page is opened
in a headless Chromium, each time in a profile of its own; loaded is the time until its first frame is drawn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.browser import Browser, browser, chromium
from tests.support.report_facts import synthetic

from benchmarks import record
from benchmarks.record import Facts
from tilewright.report.page import page

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
