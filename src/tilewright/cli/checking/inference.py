"""One call as a program whose results can be compared: what it returns, and what it leaves in its inputs and state.

Each call begins with the same inputs and the same state. Else what one call wrote would be an error of the next one,
and a large error of eager's would excuse any of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tilewright import measure
from tilewright.accuracy import in_float64

from .state import Slotted, same, state_of

Called = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""What a call returned, and inputs and state by name as it left them."""


class Reporting(nn.Module):
    """A module that returns what it leaves behind as well."""

    def __init__(self, inner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.inner = inner
        self._names = tuple(names)
        self.train(inner.training)

    def forward(self, *inputs: Tensor) -> Called:
        """What the module returns, and what it was given and holds behind that."""
        return _called(self.inner(*inputs), _given(self._names, inputs), state_of(self.inner))


def _given(names: Sequence[str], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"input {name}": x for name, x in zip(names, inputs, strict=True)}


def _called(result: object, given: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Called:
    """In memory of its own: results may be what a later call writes to."""
    left = {name: t.detach().clone() for name, t in (*given.items(), *state.items())}
    return tuple(t.clone() for t in measure.flatten(result)), left


@dataclass(frozen=True, slots=True)
class ComparedCalls:
    """Results as torch computes them, and in float64; `run` makes ours anew."""

    run: Callable[[], object]
    eager: object
    exact: object


def compared(
    compiled: Callable[..., object], apart: bool, eager: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> ComparedCalls:  # fmt: skip
    """Calls of what was `compiled` from a module, and of that module. Ours holds a state of its own if it came `apart`.
    Inputs and state are among the results where somebody writes to them."""
    before = {**_given(names, inputs), **{name: t.clone() for name, t in state_of(eager).items()}}
    ours = compiled if apart else eager
    held = [Slotted.of(module) for module in (eager, ours)]

    def afresh() -> list[Tensor]:
        for slotted in held:
            slotted.put_back()
        for name, t in (*state_of(eager).items(), *state_of(ours).items()):
            if name in before and not same(t, before[name]):
                t.copy_(before[name])
        return [x.clone() for x in inputs]

    def run() -> Called:
        given = afresh()
        result = compiled(*given)
        return _called(result, _given(names, given), state_of(ours))

    whole = Reporting(eager, names)
    as_torch: Called = whole(*afresh())
    exact: Called = in_float64(whole)(*afresh())
    first = run()
    written = [
        name for name in as_torch[1]
        if name in first[1]
        and not (name in before and all(same(left[name], before[name]) for _, left in (as_torch, first)))
    ]  # fmt: skip

    def told(called: Called) -> object:
        if not written:
            return called[0]
        return {"results": called[0], "written": {name: called[1][name] for name in written}}

    return ComparedCalls(lambda: told(run()), told(as_torch), told(exact))


def results_of(tree: object) -> object:
    """The results alone."""
    return tree["results"] if isinstance(tree, dict) else tree  # pyright: ignore[reportUnknownVariableType]
