"""What runs the plan of a cover."""

from __future__ import annotations

from torch import Tensor

from tilewright.options import Options
from tilewright.pipeline.build import Runnable
from tilewright.pipeline.state import PlannedGraph
from tilewright.runtime.plan.executable import TRUSTED, Executable, Guards
from tilewright.runtime.plan.verified import Level, checks_of

from . import BACKENDS, backend_of


def executable(
    made: PlannedGraph, options: Options, *, guards: Guards = TRUSTED, saves: int | None = None,
    kind: str = "inference", checked: Level | None = None,
) -> Executable:  # fmt: skip
    """What runs a plan on its device. `saves`: the first result that is saved for a backward pass.
    `kind`: which graph of a program it is, for errors. `checked`: another level of checks than the option's."""
    cover, plan = made.cover, made.plan
    held = [t.to(plan.device) for t in cover.graph.constants.values() if isinstance(t, Tensor)]
    checks = checks_of(cover, plan, options.verify if checked is None else checked, kind)
    # library calls alone run on any device
    backend = backend_of(plan.device) or BACKENDS["cuda"]
    return backend.executable(Runnable(plan, held, made.unit, options, guards, checks, saves))
