"""Tensors that jump are known by eager's own runs, and what is wrong in one is still refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from benchmarks.zoo import chaos, child
from benchmarks.zoo.child import part
from benchmarks.zoo.models import Made
from torch import Tensor, nn

DRAWS, SIZE = 21, 4000


def exact() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=draw, dtype=torch.float64) for _ in range(DRAWS)]


def run(seed: int, largest: float = 1.0, every: int = 3) -> list[Tensor]:
    """Noise of rounding; and in each third draw an element that jumps by up to its own size."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for k, r in enumerate(exact()):
        t = r + 1e-6 * torch.randn(SIZE, generator=draw, dtype=torch.float64)
        if largest and k % every == 0:
            at = int(torch.randint(SIZE, (1,), generator=draw))
            t[at] = r[at] * (1 - largest * float(torch.rand(1, generator=draw)))
        found.append(t.float())
    return found


def found(ours: list[Tensor], jump: float = 1.0) -> chaos.Judgement | None:
    eager, others = run(1, jump), [run(2, jump), run(3, jump)]
    return chaos.judged(ours, eager, exact(), others, chaos.jump(eager, exact(), others))


def test_jumps_as_eager_in_other_ways_makes_them_pass() -> None:
    verdict = found(run(4))
    assert verdict is not None and verdict.passed, verdict
    larger = run(4)
    larger[0][17] += 4 * larger[0][17].abs() + 1  # the plain rule would want eager to jump as far
    verdict = found(larger)
    assert verdict is not None and verdict.why.startswith("jumps")


def test_the_plain_rule_stands_where_eager_does_not_jump() -> None:
    assert found(run(4), jump=0.0) is None


def scaled(t: Tensor) -> Tensor:
    return t * 1.02


def shifted(t: Tensor) -> Tensor:
    return t + 1e-5


def without_its_last(t: Tensor) -> Tensor:
    return torch.cat([t[:-1], torch.zeros(1)])


def one_nearly(t: Tensor) -> Tensor:
    return torch.cat([t[:-1], t[-1:] * 1.001])


def often(t: Tensor) -> Tensor:
    """Elements that chance takes, one in a hundred."""
    return torch.where(torch.rand(SIZE, generator=torch.Generator().manual_seed(9)) < 0.01, t * 1.01, t)


def not_a_number(t: Tensor) -> Tensor:
    return torch.cat([t[:-1], torch.full((1,), torch.nan)])


@pytest.mark.parametrize("defect", [scaled, shifted, without_its_last, one_nearly, often, not_a_number])
def test_what_is_wrong_is_refused(defect: Callable[[Tensor], Tensor]) -> None:
    verdict = found([defect(t) for t in run(4)])
    assert verdict is not None and not verdict.passed


def test_more_jumps_than_eagers_are_refused() -> None:
    verdict = found(run(4, every=1), jump=1.0)
    assert verdict is not None and not verdict.passed and "19 jumps" in verdict.why


@pytest.mark.parametrize("rows", [2, 20])
def test_one_edge_moves_a_row(rows: int) -> None:
    """However many elements a row has; but not in more rows than eager's edges move."""
    ours = [t.reshape(100, 40) for t in run(4, every=30)]
    for k in range(rows):
        ours[k][3 * k] *= 0.9
    others = [[t.reshape(100, 40) for t in run(n, largest=2.0)] for n in (1, 2, 3)]
    wanted = [r.reshape(100, 40) for r in exact()]
    verdict = chaos.judged(ours, others[0], wanted, others[1:], chaos.jump(others[0], wanted, others[1:]))
    assert verdict is not None and verdict.passed is (rows == 2), verdict


@pytest.mark.parametrize(("draws", "far"), [(2, 0.3), (3, 0.3), (1, 30.0)])
def test_few_draws_may_jump_alone_but_not_far(draws: int, far: float) -> None:
    """Near the end of a network eager may not jump in this tensor at all, but does in others."""
    ours = run(4, largest=0.0)
    for t in ours[:draws]:
        t *= 1 + far
    verdict = chaos.judged(ours, run(1, 0.0), exact(), [run(2, 0.0), run(3, 0.0)], largest=0.2)
    assert verdict is not None and verdict.passed is ((draws, far) == (2, 0.3)), verdict


@pytest.mark.parametrize(
    ("factor", "size", "passes"), [(3.0, 0.0, True), (30.0, 0.0, False), (3.0, 1e-9, None)]
)
def test_what_is_zero_but_for_rounding_has_no_digits_to_compare(
    factor: float, size: float, passes: bool | None
) -> None:
    """A few times eager's noise passes; where eager has a right digit there is none of this verdict."""
    wanted = [torch.full((32,), size, dtype=torch.float64) for _ in range(21)]
    eager = [w.float() + 1e-10 * torch.randn(32) for w in wanted]
    ours = [w.float() + factor * 1e-10 * torch.randn(32) for w in wanted]
    verdict = chaos.noise(ours, eager, wanted)
    assert (None if verdict is None else verdict.passed) is passes


FLIPPED = [False]


@contextlib.contextmanager
def flipped(_: str) -> Iterator[None]:
    """Eager rounds the other way meanwhile."""
    FLIPPED[0] = True
    try:
        yield
    finally:
        FLIPPED[0] = False


class Edge(nn.Module):
    """What sums that cancel leave decides what passes. Where it is compiled, it may be wrong."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.ones(500)), wrong

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        compiled = torch.compiler.is_compiling()
        left = 1e-7 if x.dtype == torch.float32 and (compiled or FLIPPED[0]) else -1e-7
        edge = torch.where(x.abs() > (2.8 if compiled else 2.5), left, 1.0)
        factor = 1.01 if compiled and self.wrong else 1.0
        return torch.relu(y - y.detach() + edge.to(x.dtype)) * factor


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_jumps_is_judged_by_the_tool(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "ways", lambda pixels, device: ["flipped"])
    monkeypatch.setattr(chaos, "rounding", flipped)
    monkeypatch.setattr(child, "captured_otherwise", lambda *_: False)  # this one tells when it is compiled
    torch.manual_seed(0)
    inputs = {"x": torch.randn(20, 500)}
    facts = part(Made(Edge(wrong), inputs, "encoder", ""), training=True, channels_last=False)
    gradients = facts["gradients"]
    assert isinstance(gradients, dict)
    assert gradients["passed"] is not wrong, gradients
    assert gradients.get("jumping") == 1, gradients
