"""What is wanted of the attention variants, and whether the recorded rows show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.attention.peers import CUDNN, EAGER, FLEX, INDUCTOR, KERNELS, ORT, OURS
from benchmarks.attention.turn import best_peer, milliseconds
from benchmarks.attention.workloads import STATISTICS, WORKLOADS
from benchmarks.gpu_report import Figure, Judge, figure
from benchmarks.record import Facts
from tilewright import measure

MILLISECONDS: Mapping[str, tuple[float, float]] = {
    "vanilla": (0.36, 0.28),
    "gemma2": (0.40, 0.30),
    "h2o": (0.55, 0.42),
    "roco": (0.60, 0.44),
    "snapkv": (0.55, 0.42),
    "corm": (0.70, 0.50),
    "keyformer": (1.05, 0.75),
}
"""At least and hoped for, on an H200 at `STANDARD`."""

HEADS = {"heads": 32, "kv_heads": 32, "depth": 128, "batch": 1, "keys": 0, "dtype": "float16"}
"""Of the cores that figures of a GPU are about; `keys` 0: as many as queries."""
STANDARD = {"queries": 4096, **HEADS}
ON_CPU = {
    "queries": 2048, "heads": 8, "kv_heads": 8, "depth": 64, "batch": 1, "keys": 0, "dtype": "float32"
}  # fmt: skip
"""The same of a CPU."""
STORED = {"keyformer": 2, "snapkv": 2}
"""Statistics kept between kernels, one float per (head, place); 1 where nothing else is said."""

ROOM = 8 << 20

Rows = Sequence[Facts]


def of(rows: Rows, **wanted: object) -> list[Facts]:
    """The rows that have these facts."""
    return [
        r for r in rows if "contestants" in r and all(r.get(key) == value for key, value in wanted.items())
    ]


def speeds(rows: Iterable[Facts], peer: str | None = None, own: str = OURS) -> list[float]:
    """Our speed over a peer's, or over the best of all, where both ran and are right."""
    found: list[float] = []
    for row in rows:
        contestants: Mapping[str, Facts] = row["contestants"]  # type: ignore[assignment]
        mine = milliseconds(contestants.get(own, {}))
        theirs = best_peer(row) if peer is None else milliseconds(contestants.get(peer, {}))
        if mine and theirs:
            found.append(theirs / mine)
    return found


def at_least(limit: float) -> Judge:
    """The geometric mean."""
    return lambda v: (f"{measure.geomean(v):.2f}x of {len(v)}", measure.geomean(v) >= limit)


def at_most(limit: float, form: str = "{:.3f} ms") -> Judge:
    """The largest."""
    return lambda v: (form.format(max(v)), max(v) <= limit)


def asked(
    name: str, rows: Rows, who: str, values: Sequence[float], judge: Judge, wanted: str
) -> list[Figure]:
    """A figure, if some of its rows have the contestant: then it is judged, or, without values, not measured."""
    if not any(who in r["contestants"] for r in rows):  # type: ignore[operator]
        return []
    return [figure(name, values, judge, wanted)]


def on_gpu(rows: Rows) -> list[Figure]:
    """The wanted figures of a GPU, as far as rows were asked for that they are about."""
    cores = of(rows, part="core", **HEADS)
    standard = of(cores, **STANDARD)
    found: list[Figure] = []
    for name, (limit, hope) in MILLISECONDS.items():
        mine = of(standard, core=name)
        times = [milliseconds(r["contestants"].get(OURS, {})) for r in mine]  # type: ignore[union-attr]
        wanted = f"<= {limit:.2f} ms, hope {hope:.2f}"
        found += asked(f"{name} at 4096", mine, OURS, [t for t in times if t], at_most(limit), wanted)
    long = [r for r in cores if r["core"] in STATISTICS and r["queries"] in (4096, 8192)]
    best = (long, OURS, speeds(long), at_least(4.2), ">= 4.2x, hope 5.3")
    found += asked("statistics over the best peer", *best)
    for name, peer, limit, own in (
        ("gemma2", FLEX, 2.0, OURS), ("vanilla", FLEX, 1.1, KERNELS), ("vanilla", CUDNN, 0.75, KERNELS),
    ):  # fmt: skip
        some = [r for r in of(standard, core=name) if own in r["contestants"]]  # type: ignore[operator]
        title = f"{name}{', generated,' if own == KERNELS else ''} over {peer}"
        found += asked(title, some, peer, speeds(some, peer, own), at_least(limit), f">= {limit}x")
    some = of(standard, core="vanilla")
    found += asked("vanilla over the best peer", some, OURS, speeds(some), at_least(0.97), ">= 0.97x")
    beyond = [float(extra) - allowed(r) for r in cores if (extra := extra_of(r, OURS)) is not None]
    wanted = "8 MiB + 4 bytes per (head, place) and kept statistic"
    room = at_most(0, "{:.0f} bytes")
    found += asked("memory beyond what is allowed", cores, OURS, beyond, room, wanted)
    for name in WORKLOADS:
        limit = 1.0 if name == "vanilla" else 1.3
        some = of(rows, part="llama", layers=32, queries=4096, core=name)
        speed = speeds(some, INDUCTOR)
        found += asked(f"32 layers, {name} over Inductor", some, OURS, speed, at_least(limit), f">= {limit}x")
    return found


def on_cpu(rows: Rows) -> list[Figure]:
    """The wanted figures of a CPU, as far as rows were asked for that they are about."""
    cores = of(rows, part="core", **ON_CPU)
    found: list[Figure] = []
    for peer in (INDUCTOR, ORT):
        found += asked(f"cores over {peer}", cores, peer, speeds(cores, peer), at_least(3.0), ">= 3x")
    shares = [
        mine / eager
        for row in cores
        if (mine := extra_of(row, OURS)) is not None and (eager := extra_of(row, EAGER))
    ]
    share = at_most(0.05, "{:.1%}")
    return found + asked("extra memory over eager's", cores, EAGER, shares, share, "<= 1/20")


def extra_of(row: Facts, name: str) -> float | None:
    """Bytes that a contestant takes beyond inputs and results."""
    item: Facts = row["contestants"].get(name, {})  # type: ignore[union-attr,index]
    extra = item.get("extra_bytes")
    return float(extra) if isinstance(extra, int | float) else None


def allowed(row: Facts) -> float:
    """Bytes that a core may take beyond inputs and results."""
    places = float(row["batch"]) * float(row["heads"]) * float(row["queries"])  # type: ignore[arg-type]
    return ROOM + 4 * places * STORED.get(str(row["core"]), 1)
