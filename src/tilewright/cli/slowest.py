"""What takes the longest of all that a model runs, and what keeps it from being faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tilewright.report.records import KernelRecord
from tilewright.report.taken import ExplainedStep
from tilewright.report.texts import count, duration
from tilewright.target import Target
from tilewright.tuning.text_limits import TEXTS


@dataclass(frozen=True, slots=True)
class StepBound:
    """What a step waits for most, what that takes at least in seconds, and the work in words."""

    name: str
    seconds: float
    work: str


def bound_of(step: ExplainedStep, machine: Target | None, threads: int) -> StepBound | None:
    """The largest of what a machine needs for a step's least bytes, its operations and its exponentials; None where
    these are not known. Of a CPU `threads` cores take part."""
    if machine is None:
        return None
    record, (_, least) = step.record, step.bytes
    share = min(threads, machine.cores) / machine.cores if machine.language == "cpp" else 1.0
    fastest = max([machine.flops, *(unit.flops for unit in machine.matrix_units)]) * share
    found = [
        StepBound(name, amount / rate, f"{count(amount)}{unit}")
        for name, amount, rate, unit in (
            ("memory", least, machine.device.bandwidth, "B"),
            ("arithmetic", record.flops, fastest, "flop"),
            ("exponentials", record.exps, machine.special * share, "exp"),
        )
        if amount
    ]
    if not found:
        return None
    most = max(found, key=lambda b: b.seconds)
    return (
        most if most.seconds > machine.launch_seconds else StepBound("its start", machine.launch_seconds, "")
    )


def seconds_of(step: ExplainedStep, timed: bool) -> float:
    """What a step takes: by the clock where it was timed, else as it is modelled."""
    return step.measured if timed and step.measured is not None else step.record.seconds or 0.0


def slowest_texts(
    steps: Sequence[ExplainedStep], bounds: Sequence[StepBound | None], timed: bool
) -> list[str]:
    """A line for the step that takes the longest, and one for such a generated kernel if that is another."""
    if not steps:
        return []
    order = sorted(range(len(steps)), key=lambda k: -seconds_of(steps[k], timed))
    kernel = next((k for k in order if steps[k].is_kernel), None)
    lines = [f"slowest: {_text(order[0], steps, bounds[order[0]], timed)}"]
    if kernel is not None and kernel != order[0]:
        lines.append(f"slowest generated kernel: {_text(kernel, steps, bounds[kernel], timed)}")
    return lines


def _text(k: int, steps: Sequence[ExplainedStep], bound: StepBound | None, timed: bool) -> str:
    step, taken = steps[k], seconds_of(steps[k], timed)
    total = sum(seconds_of(s, timed) for s in steps)
    share = f", {taken / total:.1%} of all" if total else ""
    text = f"#{k} {step.record.name}, {duration(taken)}{share}"
    if bound is not None:
        least = f": {bound.work} take {duration(bound.seconds)} at least" if bound.work else ""
        text += f"; bound by {bound.name}{least}"
        if timed and bound.seconds:
            text += f", it took {taken / bound.seconds:.1f} times that"
    moved, least_bytes = step.bytes
    if moved and least_bytes and moved > TEXTS.bytes_told_from * least_bytes:
        text += f"; it moves {moved / least_bytes:.2f} times the least bytes"
    if step.is_kernel:
        text += f"; ends there as {cast(KernelRecord, step.record).boundary.value}"
    return text
