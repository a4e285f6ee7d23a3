"""A captured program beside the graph that it was understood as, node by node."""

# What torch offers to interpreters it names with underscores.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from tilewright.interp.algebra import to_numpy
from tilewright.interp.graph import run_values
from tilewright.runtime.call.fallback import Captured
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Result
from tilewright.tuning.search_limits import BISECTION

from .states import CompiledStates, Suspect


class _Recording(fx.Interpreter):
    """Runs a captured program and keeps what each node made."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.made: dict[str, list[Tensor]] = {}

    def run_node(self, n: fx.Node) -> object:
        """The node's result, written down."""
        result = super().run_node(n)
        self.made[n.name] = [t.detach().clone() for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result


class Compared(Captured):
    """Runs a captured program as it is, and adds to `found` the first node of which the calls of the graph (in its
    first state) make something else."""

    def __init__(
        self,
        gm: fx.GraphModule,
        frozen: Mapping[str, Tensor],
        lowering: CompiledStates,
        found: list[Suspect],
    ) -> None:
        super().__init__(gm, frozen)
        self.recording = _Recording(gm)
        self.frozen = frozen
        self.names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        self.lowering, self.found = lowering, found

    def __call__(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """Run on flat arguments."""
        given = [a.clone() if isinstance(a, Tensor) else a for a in args]
        copies = iter([a.clone() if isinstance(a, Tensor) else a for a in args])
        with torch.no_grad():
            self.recording.run(*[self.frozen[n] if n in self.frozen else next(copies) for n in self.names])
            self._look(given)
        return super().__call__(args, out)

    def _look(self, given: Sequence[Argument]) -> None:
        graph = self.lowering.captured
        try:
            values, _ = run_values(graph, list(given))
        except Exception:  # noqa: BLE001  (whatever a call that was misunderstood raises: nothing can be compared)
            return
        for origin in graph.origins:
            made = self.recording.made.get(origin.node, [])
            ours = [values[v] for v in origin.outputs if v in values]
            for v, a, b in zip(origin.outputs, ours, made, strict=False):
                if len(ours) == len(origin.outputs) and not _is_near(to_numpy(a), to_numpy(b.cpu())):
                    places = (origin.place,) if origin.place else ()
                    self.found.append(
                        Suspect(self.lowering.name, "capture", "capture", origin.node or origin.name,
                                  (origin.name,), places, repr(v))
                    )  # fmt: skip
                    return


def _is_near(ours: np.ndarray, made: np.ndarray) -> bool:
    if ours.shape != made.shape:
        return False
    if ours.dtype.kind not in "fc":
        return bool((ours == made).all())
    wide, other = ours.astype(np.float64), made.astype(np.float64)
    scale = float(np.nan_to_num(np.abs(other), posinf=0.0).max(initial=0.0))
    return bool(
        np.allclose(
            wide, other, rtol=BISECTION.rounding_ratio, atol=BISECTION.rounding_ratio * scale, equal_nan=True
        )
    )
