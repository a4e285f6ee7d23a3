"""The wanted figures of the memory-bound kernels, from the recorded rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu_cases import RMS_NORM
from benchmarks.gpu_peers import EAGER, FUSED, INDUCTOR, INDUCTOR_DYNAMIC, OURS, OURS_DYNAMIC
from benchmarks.gpu_report import Figure, Judge, figure
from benchmarks.record import Facts
from tilewright.measure import geomean

LARGE = 64.0
"""MiB of the largest tensor from which on a kernel counts as bound by memory alone."""

COPY, COPY_KERNEL = "copy", "copy (kernel)"
SPECIAL = "rms norm 4096x4096 float16"
PEERS = (EAGER, FUSED, INDUCTOR, INDUCTOR_DYNAMIC)


@dataclass(frozen=True)
class Row:
    """One kernel, type and size: microseconds of the contestants whose results are right and possible."""

    case: str
    dtype: str
    mebibytes: float
    odd: bool
    special: bool
    copy: float
    times: Mapping[str, float]
    faults: tuple[str, ...]
    """What is wrong with a contestant's results or timing."""
    flushed: Mapping[str, float]
    """Microseconds of single runs, each after a write that clears the cache; copies too."""

    @property
    def name(self) -> str:
        """`softmax float16 64 MiB odd`."""
        return f"{self.case} {self.dtype} {self.mebibytes:g} MiB{' odd' if self.odd else ''}"

    @property
    def ours(self) -> float | None:
        """Compiled for these sizes."""
        return self.times.get(OURS)

    @property
    def best_peer(self) -> float | None:
        """The fastest of the others."""
        return min((self.times[p] for p in PEERS if p in self.times), default=None)

    @property
    def share(self) -> float | None:
        """Ours as a share of the copy bandwidth."""
        return self.copy / self.ours if self.ours else None

    def speed_over(self, peer: str) -> float | None:
        """How many times as fast as a peer ours is."""
        return self.times[peer] / self.ours if self.ours and peer in self.times else None

    @property
    def speed(self) -> float | None:
        """How many times as fast as the best peer ours is."""
        return self.best_peer / self.ours if self.ours and self.best_peer else None

    @property
    def dynamic(self) -> float | None:
        """Time compiled for all sizes over time compiled for these."""
        return self.times[OURS_DYNAMIC] / self.ours if self.ours and OURS_DYNAMIC in self.times else None

    @property
    def single(self) -> Row | None:
        """The same row with its times of single runs after a flush."""
        copies = [self.flushed[name] for name in (COPY, COPY_KERNEL) if name in self.flushed]
        times = {name: time for name, time in self.flushed.items() if name in self.times}
        return replace(self, copy=min(copies), times=times) if copies else None

    @property
    def large(self) -> bool:
        """Whether it counts for the figures of kernels bound by memory."""
        return self.mebibytes >= LARGE


def rows(cases: Mapping[str, Facts]) -> list[Row]:
    """From the recorded facts of all cases."""
    return [_row(case, point) for case, facts in cases.items() for point in facts.get("points", ())]  # type: ignore[union-attr,arg-type]


def _row(case: str, point: Mapping[str, object]) -> Row:
    times: dict[str, float] = {}
    faults: list[str] = []
    for name, facts in point["contestants"].items():  # type: ignore[attr-defined]
        accurate = facts.get("accuracy", {})
        if accurate.get("passed") is False:
            faults.append(f"{name}: {accurate.get('reason', 'wrong')}")
        elif "impossible" in facts:
            faults.append(f"{name}: {facts['impossible']}")
        elif "median_us" in facts:
            times[name] = facts["median_us"]
    return Row(
        case,
        str(point["dtype"]),
        float(point["mebibytes"]),  # type: ignore[arg-type]
        bool(point["odd"]),
        bool(point["special"]),
        float(point["copy_us"]),  # type: ignore[arg-type]
        times,
        tuple(faults),
        dict(point.get("after_a_flush_us", {})),  # type: ignore[call-overload,attr-defined]
    )


def figures(found: Sequence[Row], recompiles: Mapping[str, int]) -> list[Figure]:
    """The lines of the table, in its order. `recompiles` counts ours per case and type."""
    large = [row for row in found if row.large]
    return [
        *_bandwidth(large, f">= {LARGE:g} MiB"),
        *_bandwidth([row.single for row in large if row.single], f">= {LARGE:g} MiB, single runs"),
        *_rms_norm(found, large),
        *_dynamic(found, recompiles),
        *_right(found),
    ]


def known(values: Sequence[float | None]) -> list[float]:
    """Those that were measured."""
    return [value for value in values if value is not None]


def _bandwidth(large: Sequence[Row], how: str) -> list[Figure]:
    even = [row for row in large if not row.odd]
    shares, speeds = known([r.share for r in even]), known([r.speed for r in even])

    def share(values: Sequence[float]) -> tuple[str, bool]:
        enough = sum(v >= 0.9 for v in values)
        text = f"geomean {geomean(values):.1%}, worst {min(values):.1%}, {enough} of {len(values)} >= 90 %"
        return text, min(values) >= 0.9

    def fast(values: Sequence[float]) -> tuple[str, bool]:
        return f"geomean {geomean(values):.3f}x of {len(values)}", geomean(values) >= 1.05

    def never_slow(values: Sequence[float]) -> tuple[str, bool]:
        slow = sum(v < 0.97 for v in values)
        return f"worst {min(values):.3f}x, {slow} of {len(values)} slower", slow == 0

    return [
        figure(f"share of copy bandwidth, {how}", shares, share, ">= 90 %, hope 95 %"),
        figure(f"speed over the best peer, {how}", speeds, fast, "geomean >= 1.05x"),
        figure(f"speed over the best peer, {how}", speeds, never_slow, "none < 0.97x"),
    ]


def _rms_norm(found: Sequence[Row], large: Sequence[Row]) -> list[Figure]:
    # Single runs after a flush, as the limit was measured.
    special = known([row.single.ours for row in found if row.special and row.single])
    norms = [
        row for row in (*large, *(r for r in found if r.special)) if row.case == RMS_NORM and not row.odd
    ]
    composed, fused = (known([r.speed_over(peer) for r in norms]) for peer in (EAGER, FUSED))

    def mean(least: float) -> Judge:
        def judge(values: Sequence[float]) -> tuple[str, bool]:
            return f"geomean {geomean(values):.2f}x, worst {min(values):.2f}x", geomean(values) >= least

        return judge

    return [
        figure(SPECIAL, special, lambda v: (f"{v[0]:.2f} us", v[0] <= 20), "<= 20 us, hope 17"),
        figure("rms norm over composed eager", composed, mean(5.0), ">= 5x"),
        figure("rms norm over torch's fused op", fused, mean(1.0), ">= 1.0x"),  # type: ignore[arg-type]
    ]


def _dynamic(found: Sequence[Row], recompiles: Mapping[str, int]) -> list[Figure]:
    even = known([row.dynamic for row in found if not row.odd])
    odd = known([row.dynamic for row in found if row.odd])

    def at_most(limit: float) -> Judge:
        def judge(values: Sequence[float]) -> tuple[str, bool]:
            over = sum(v > limit for v in values)
            text = f"geomean {geomean(values):.3f}x, worst {max(values):.3f}x, {over} of {len(values)} over"
            return text, over == 0

        return judge

    def none(values: Sequence[float]) -> tuple[str, bool]:
        return f"{sum(values):.0f} in {len(values)} kernels and types", sum(values) == 0

    return [
        figure("dynamic over static, multiples of 16", even, at_most(1.05), "<= 1.05x"),
        figure("dynamic over static, odd sizes", odd, at_most(1.15), "<= 1.15x"),
        figure("recompiles at new sizes", [float(n) for n in recompiles.values()], none, "0"),
    ]


def _right(found: Sequence[Row]) -> list[Figure]:
    ours = [row for row in found if row.ours or any(f.startswith(OURS) for f in row.faults)]
    wrong = [row for row in ours if any(f.startswith(OURS) for f in row.faults)]
    passed = not wrong if ours else None
    value = f"{len(wrong)} of {len(ours)}" if ours else "-"
    return [Figure("rows with wrong results or impossible times", value, "0", passed)]
