"""What runs the plan of a cover."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ir.expr import Expr
from tilewright.ir.kernel import Cover
from tilewright.options import Options
from tilewright.plan import Plan
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import Unit
from tilewright.runtime.plan.verified import Level, checks_of

from .backends import BACKENDS, backend_of
from .build import Runnable


def executable(
    cover: Cover, plan: Plan, unit: Unit | None, options: Options, *, trusted: bool = True,
    conditions: Sequence[Expr] = (), saves: int | None = None, kind: str = "inference", checked: Level | None = None,
) -> Executable:  # fmt: skip
    """What runs the plan of a cover on its device. `saves`: the first result that is saved for a backward pass.
    `kind`: which graph of a program it is, for errors. `checked`: another level of checks than the option's."""
    held = [t.to(plan.device) for t in cover.graph.constants.values() if isinstance(t, Tensor)]
    checks = checks_of(cover, plan, options.verify if checked is None else checked, kind)
    # library calls alone run on any device
    backend = backend_of(plan.device) or BACKENDS["cuda"]
    return backend.executable(Runnable(plan, held, unit, options, trusted, conditions, checks, saves))
