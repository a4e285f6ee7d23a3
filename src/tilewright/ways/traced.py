"""What Dynamo traces, compiled: the backend of `torch.compile`, and the graphs of one function or module."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from tilewright.capture.aliasing.overlapping import OverlappingWrite
from tilewright.capture.autograd.joint import Builders, GraphRecorder, Runner, through_autograd
from tilewright.errors import InputError, warn
from tilewright.options import Options, OptionsLike
from tilewright.pipeline.compiler import Compiled, as_captured, as_program, compile_fx
from tilewright.pipeline.trace import Trace
from tilewright.plan.coverage import Coverage, total
from tilewright.runtime.call.asked import asking
from tilewright.runtime.call.dynamo import TracedWay
from tilewright.runtime.call.recompiles import warn_at_recompile_limit
from tilewright.runtime.call.reports import ReportsOfParts

__all__ = ["Session", "TracedWay", "backend"]


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: OptionsLike = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """The backend `tilewright` of `torch.compile`. `options` as in `tilewright.options`; `mode` as torch's own compiler
    means it: "reduce-overhead" asks for CUDA graphs, "max-autotune" for them and for two minutes of timing kernels,
    "max-autotune-no-cudagraphs" for the latter alone.

    Weights stay inputs unless `options={"freeze": True}`, and then only where no gradient is asked for."""
    wanted = Options.make(options, mode=mode)
    with asking(runs=False):
        return Session(wanted).backend(gm, example_inputs)


warn_at_recompile_limit(backend)


SHARED_HINT = "compile another function for such calls, or give inputs that are written as a `clone()`"
"""Where a call brings inputs that share memory in another way than those that were compiled for."""


def _is_functional(x: object) -> bool:
    """Whether a tensor is one that a transform of torch's makes, in which writes are ops."""
    return isinstance(x, Tensor) and torch._is_functional_tensor(x)


@dataclass(eq=False)
class Session(ReportsOfParts):
    """What one compiled model has compiled so far."""

    options: Options
    compiled: list[Compiled] = field(default_factory=list)
    recorder: GraphRecorder | None = None

    def fresh(self) -> Session:
        """Another one of the same options."""
        return Session(self.options)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """Compile what Dynamo captured. What writes into tensors that overlap with themselves runs as it is."""
        if any(map(_is_functional, example_inputs)):
            hint = "call it without: what is compiled is made functional anyway"
            return self._eager(gm, "torch.func.functionalize around it, which torch cannot trace", hint)
        builders = Builders(self._build, None if self.options.strict else self._plain, self._eager)
        try:
            return through_autograd(
                gm, example_inputs, builders, freeze=bool(self.options.freeze), recorder=self.recorder
            )
        except OverlappingWrite as refused:
            if self.options.strict:
                raise
            return self._as_it_is(gm, refused.message)

    def _as_it_is(self, gm: fx.GraphModule, reason: str) -> Callable[..., object]:
        done, run = as_program(gm, reason)
        self.compiled.append(done)
        return run

    def _eager(self, gm: fx.GraphModule, reason: str, hint: str = SHARED_HINT) -> Callable[..., object]:
        """What runs calls that nothing was compiled for. Raises InputError under `strict`."""
        if self.options.strict:
            raise InputError(f"a program was called with {reason}", phase="input", hint=hint)
        warn(f"a program was called with {reason}: such calls run in eager mode ({hint})", RuntimeWarning)
        return self._as_it_is(gm, reason)

    def _build(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        done = compile_fx(gm, self.options, frozen=frozen, trusted=True, kind=kind)
        self.compiled.append(done)
        return done.executable  # pyright: ignore[reportReturnType]  (arguments and results of a graph are what it says)

    def _plain(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        done = as_captured(gm, self.options, "on the CPU", frozen=frozen, kind=kind)
        self.compiled.append(done)
        return done.executable  # pyright: ignore[reportReturnType]  (as above)

    @property
    def coverage(self) -> Coverage | None:
        """Of all graphs together."""
        return total([c.coverage for c in self.compiled])

    def reporting(self) -> Sequence[Compiled]:
        """All graphs, in the order in which they were compiled."""
        return self.compiled

    @property
    def trace(self) -> Trace:
        """Of the graph compiled last."""
        return self.compiled[-1].trace if self.compiled else Trace()
