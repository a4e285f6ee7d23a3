"""A model run by each contestant on the same draws of inputs: compiled, eager, in float64, eager in other ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.zoo import chaos
from benchmarks.zoo.draws import Kept, Step, Triple, redrawn, taken
from benchmarks.zoo.models import Made, tensors
from tilewright import accuracy

SEED = 3
CAPTURE = "aot_eager"
"""Torch's own backend that runs what was captured op by op: what is wrong or refused there is torch's."""


def forward(model: Callable[..., object], inputs: dict[str, Tensor]) -> list[Tensor]:
    """The tensors that a model gives without gradients."""
    with torch.no_grad():
        return [t.detach() for t in tensors(model(**inputs))]


def step(call: Callable[..., object], model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """One forward and backward of `call`, which runs `model`: results, gradients of weights, buffers."""
    model.zero_grad(set_to_none=True)
    results = tensors(call(**inputs))
    live = [r for r in results if r.requires_grad]
    loss = sum((r * _weights(r)).sum() for r in live)
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return Step([r.detach() for r in results], gradients, [b.clone() for b in model.buffers()])


def _weights(r: Tensor) -> Tensor:
    """Fixed random weights of a result in the loss, the same in every precision."""
    drawn = torch.randn(r.shape, generator=torch.Generator().manual_seed(SEED)) / max(1, r.numel()) ** 0.5
    return drawn.to(r.device, r.dtype)


def exact_step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """The step of a model in float64, its casts widened as well."""
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    with accuracy._WideCalls(), accuracy._Wide():
        return step(model, model, wide)


NEAR = 1e-2
"""Two results of one program in single precision differ by no more of their size."""
Way = tuple[str, Callable[..., object], nn.Module, bool]
"""Another way of eager: its name, what is called, its model, and whether that is channels-last."""


@dataclass
class Runs:
    """The runs of a model, in a memory format, each contestant with a copy of its own, as buffers change in training.
    Draw 0 is the inputs as they are."""

    found: Made
    training: bool
    channels_last: bool
    model: nn.Module = field(init=False)
    inputs: dict[str, Tensor] = field(init=False)
    eager_model: nn.Module = field(init=False)
    exact_model: nn.Module = field(init=False)
    own: nn.Module = field(init=False)
    compiled: Callable[..., object] | None = None
    ways: list[Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.inputs = self.found.model, dict(self.found.inputs)
        if self.channels_last:
            self.model = chaos.in_format(self.model, True)
            self.inputs = chaos.inputs_in_format(self.inputs, True)
        self.model.train(self.training)
        self.eager_model, self.own = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.exact_model = copy.deepcopy(self.model).double()

    def once(
        self, call: Callable[..., object], on: nn.Module, given: dict[str, Tensor] | None = None
    ) -> Step:
        """What `call`, which runs the model `on`, leaves behind."""
        torch.manual_seed(SEED)
        inputs = self.inputs if given is None else given
        if not self.training:
            return Step(forward(call, inputs), [], [])
        made = step(call, on, inputs)
        on.zero_grad(set_to_none=True)  # of many copies only the steps at hand hold gradients
        return made

    def eagerly(self, given: dict[str, Tensor] | None = None) -> Step:
        """What eager leaves behind."""
        return self.once(self.eager_model, self.eager_model, given)

    def exactly(self, given: dict[str, Tensor] | None = None) -> Step:
        """What eager leaves behind in float64."""
        torch.manual_seed(SEED)
        inputs = self.inputs if given is None else given
        if self.training:
            made = exact_step(self.exact_model, inputs)
            self.exact_model.zero_grad(set_to_none=True)
            return made
        return Step([t.detach() for t in tensors(accuracy.in_float64(self.model)(**inputs))], [], [])

    def captured(self) -> Step:
        """What torch captured leaves behind, run op by op."""
        model = copy.deepcopy(self.model)
        return self.once(torch.compile(model, backend=CAPTURE), model)

    def draw(self, number: int) -> dict[str, Tensor]:
        """The inputs of a draw."""
        return self.inputs if number == 0 else redrawn(self.inputs, number - 1)

    def more(self, name: str, kept: Kept, numbers: Sequence[int]) -> list[list[Triple]]:
        """`draws.More` of these draws."""
        assert self.compiled is not None
        found: list[list[Triple]] = []
        for number in numbers:
            d = self.draw(number)
            steps = (self.once(self.compiled, self.own, d), self.eagerly(d), self.exactly(d))
            found.append(list(zip(*(taken(getattr(s, name), kept) for s in steps), strict=True)))
        return found

    def others(self, name: str, kept: Kept, numbers: Sequence[int]) -> list[list[list[Tensor]]]:
        """`draws.Others` of these draws: each way from the same state on through all draws that are asked of it."""
        if not self.ways or 0 in numbers:
            names = chaos.ways(self.found.pixels, next(iter(self.inputs.values())).device.type)
            self.ways = [self._way(n) for n in names if n != chaos.CAPTURED or self._is_captured_alike()]
        runs: list[list[list[Tensor]]] = []
        for way, call, on, last in self.ways:
            with chaos.rounding(way):
                given = (chaos.inputs_in_format(self.draw(n), last) for n in numbers)
                runs.append([taken(getattr(self.once(call, on, d), name), kept) for d in given])
        return runs

    def _is_captured_alike(self) -> bool:
        """Whether what torch captured is eager's program but for rounding: near what that gives, or about as near as
        that to what is exact (gradients that cancel are all rounding)."""
        fresh = Runs(self.found, self.training, self.channels_last)
        try:
            captured = fresh.captured()
        except Exception:  # noqa: BLE001 - then it is no way to run the model
            return False
        steps = [(*s.results, *s.gradients, *s.buffers) for s in (captured, fresh.eagerly(), fresh.exactly())]
        return all(_alike(*trio) for trio in zip(*steps, strict=True))

    def _way(self, way: str) -> Way:
        last = self.channels_last != (way == chaos.FORMAT)
        on = chaos.in_format(self.model, last) if self.found.pixels else copy.deepcopy(self.model)
        return way, torch.compile(on, backend=CAPTURE) if way == chaos.CAPTURED else on, on, last


def _alike(captured: Tensor, eager: Tensor, exact: Tensor) -> bool:
    if captured.shape != eager.shape or not eager.is_floating_point():
        return captured.equal(eager)
    c, e, r = (t.double() for t in (captured, eager, exact))
    return bool(_rms(c - e) <= NEAR * _rms(e)) or bool(_rms(c - r) <= chaos.FAR * _rms(e - r))


def _rms(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()


__all__ = ["CAPTURE", "SEED", "Runs", "exact_step", "forward", "step"]
