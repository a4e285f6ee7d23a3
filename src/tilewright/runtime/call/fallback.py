"""What runs where a phase refuses a graph: the captured program itself, counted as such."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from tilewright.capture.harmless.running import HarmlessOps
from tilewright.capture.node import counted_nodes
from tilewright.errors import InputError
from tilewright.plan.coverage import Coverage, Row
from tilewright.runtime.plan.arguments import Argument, deliver
from tilewright.runtime.plan.known_sizes import Result


class Captured:
    """Runs a captured graph as it is. `frozen` are its placeholders that are constants."""

    def __init__(self, gm: fx.GraphModule, frozen: Mapping[str, Tensor]) -> None:
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        self.record: object = None
        self._gm = gm
        self._fixed = tuple((k, frozen[n]) for k, n in enumerate(names) if n in frozen)
        self._count = len(names)
        self.written: tuple[int, ...] = ()

    def __call__(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """Run on flat arguments; the list is emptied. Raises InputError for `out`, which it cannot write into."""
        if out is not None:
            raise InputError(
                "out= is not supported for this program", phase="input", hint="see .coverage for the reason"
            )
        given: list[Argument] = list(args)
        args.clear()
        for k, t in self._fixed:
            given.insert(k, t)
        if len(given) != self._count:
            raise InputError(f"{len(given)} inputs were given, {self._count} are needed", phase="input")
        with torch.no_grad():
            return list(self._gm(*given))

    def admits(self, args: Sequence[Argument]) -> bool:
        """Whether there are as many arguments as the graph takes; the program itself finds out the rest."""
        return len(args) + len(self._fixed) == self._count


def captured_coverage(gm: fx.GraphModule, reason: str) -> Coverage:
    """Every op of the graph as a library call by need."""
    names = Counter(counted_nodes(gm))
    rows = tuple(Row(name, reason, count) for name, count in names.most_common())
    return Coverage(sum(names.values()), 0, 0, need=rows)


class EagerRegion:
    """A module that runs eagerly, as library calls of its nodes `names`; by default because control flow in it depends
    on data."""

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], why: str = "control flow that depends on data"
    ) -> None:
        self._module = module
        rows = tuple(Row(name, why, count) for name, count in Counter(names).items())
        self.coverage = Coverage(len(names), 0, 0, need=rows)
        self.kernels: tuple[object, ...] = ()
        self.calls: tuple[object, ...] = ()
        self.cuda_graphs: tuple[str, ...] = ()
        self.trace: object = None
        self.compilations: tuple[object, ...] = ()

    def admits(self, leaves: Sequence[object]) -> bool:
        """Any inputs: the model itself finds out what fits."""
        del leaves
        return True

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """The model's result for its inputs. Raises ModelError where an op of it may reach memory that is not its own:
        who made the model is not known, and no graph of it was looked at."""
        with torch.no_grad(), HarmlessOps():
            result = self._module(*leaves)
        return result if out is None else deliver(result, out, [x for x in leaves if isinstance(x, Tensor)])
