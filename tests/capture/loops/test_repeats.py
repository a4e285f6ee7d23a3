"""Python loops as loops: parts of any length and step, numbers that change, states of several steps before, beginnings
of another type, precision that is switched around them, steps that are checkpointed, integers beside gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer, gradients, loops
from tests.capture.loops.random_loops import disturbed, dropped
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tilewright.capture.loops import rolled

__all__ = ["fewer"]

STEPS = 12


def recurrent(part: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.tanh(part(x, t) + h @ w)
        return h

    return run


PARTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "every_second": lambda x, t: x[:, 2 * t],
    "from_behind": lambda x, t: x[:, -1 - 2 * t],
    "pairs": lambda x, t: x[:, 2 * t : 2 * t + 2].sum(1),
    "windows": lambda x, t: x[:, t : t + 5].sum(1),
    "windows_apart": lambda x, t: x[:, 2 * t + 1 : 2 * t + 2, None].sum((1, 2)),
    "backwards": lambda x, t: x[:, 2 * STEPS - 2 * t - 2 : 2 * STEPS - 2 * t].amax(1),
    "narrow": lambda x, t: x.narrow(1, 2 * t, 2).mean(1),
    "two_of_each": lambda x, t: x[:, 2 * t] * x[:, 2 * t + 1],
    "two_dims": lambda x, t: x[:, t, 1:2],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_count(name: str) -> None:
    given = torch.randn(3, 2 * STEPS, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)
    agrees(recurrent(PARTS[name]), *given, trains=name in ("from_behind", "pairs", "windows"))


@pytest.mark.parametrize(
    "pieces", [lambda x: x.split(2, 1), lambda x: x.chunk(STEPS, dim=1), lambda x: torch.split(x, 2, dim=-2)]
)
def test_pieces_of_a_tensor(pieces: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for piece in pieces(x):
            h = torch.tanh(piece.sum(1) + h @ w)
        return h

    agrees(run, torch.randn(3, 2 * STEPS, 8), torch.randn(8, 8) / 3, torch.randn(3, 8), trains=False)


@pytest.mark.parametrize(
    "part",
    [
        lambda x, t: x[:, t, t % 4, None],
        lambda x, t: x[:, 2 * STEPS - 6 + t : 2 * STEPS - 4 + t].sum(1),  # shorter from step 5 on, then empty
    ],
)
def test_parts_that_do_not_count_stay_apart(part: Callable[[Tensor, int], Tensor]) -> None:
    same: list[bool] = []

    def watched(gm: fx.GraphModule, given: list[Tensor]) -> fx.GraphModule:
        same.append(rolled.roll_loops(gm) is gm)
        return gm

    with torch.no_grad():
        given = torch.randn(3, 2 * STEPS, 8), torch.randn(8, 8), torch.randn(3, 8)
        torch.compile(recurrent(part), backend=watched)(*given)
    assert same == [True]


NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "full": lambda h, t: torch.full((3, 8), t / STEPS),
    "full_like": lambda h, t: torch.full_like(h, 0.1 * t),
    "new_full": lambda h, t: h.new_full((3, 1), -0.0 if t == 3 else float(t)),
    "tensor": lambda h, t: torch.tensor(0.1 * t),
    "index": lambda h, t: torch.arange(20.0).index_select(0, torch.tensor([t])),
    "lengths": lambda h, t: torch.where(t < torch.tensor([3, 5, 9])[:, None], h, -h),
    "remainder": lambda h, t: (torch.arange(8) + t) % (t + 2) // 2,
    "integers": lambda h, t: torch.arange(8) * (0.25 * t),
    "halves": lambda h, t: h.half() * (0.1 * t) > 0.3 * t,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name: str) -> None:
    def run(w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            made = NUMBERS[name](h, t)
            h = torch.sin(h @ w + made)
        return h

    agrees(run, torch.randn(8, 8) / 3, torch.randn(3, 8), trains=name in ("full_like", "lengths"))


def test_numbers_beside_halves_without_dims_stay_apart() -> None:
    """A tensor in the place of the number would make singles of them."""

    def run(h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.sin(h * (1 + 0.1 * t))
        return h

    agrees(run, torch.tensor(0.5, dtype=torch.float16), count=0, trains=False)


def test_a_part_that_stays_for_some_steps() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for k in range(3):
            for _ in range(STEPS):
                h = torch.tanh(h @ w + x[k])
        return h

    agrees(run, torch.randn(3, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8), trains=False)


@pytest.mark.parametrize("alike", [True, False])
def test_states_of_three_steps_before(alike: bool) -> None:
    def run(h: Tensor, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = (h, h) if alike else (x, y)
        for _ in range(2 * STEPS):
            a, b, h = b, h, torch.tanh(h @ w + a)
        return a, b, h

    given = torch.randn(3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8), torch.randn(3, 8)
    agrees(run, *given, trains=alike)


def test_precision_that_is_switched_around_a_loop() -> None:
    """The state begins in singles, and is in halves from the first step on."""

    def run(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for row in x:
                h = torch.relu(F.linear(row, w) + F.linear(h, u))
        return h

    given = torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(8, 8) / 3, torch.randn(3, 8)
    with torch.no_grad():
        have = torch.compile(run, backend="tilewright", fullgraph=True)(*given)
        torch.testing.assert_close(have, run(*given), rtol=0.05, atol=0.05)  # a few units of bfloat16
    assert have.dtype == torch.bfloat16 and loops() == 1


@pytest.mark.parametrize("carried", [True, False])
def test_integers_beside_gradients(carried: bool) -> None:
    """Torch's scans have no gradient where they make integers: they carry numbers. These wrap around."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        count, few = torch.full((3,), -5), torch.zeros(3, dtype=torch.int8)
        short, middle = (
            torch.full((3,), 31745, dtype=torch.int16),
            torch.full((3,), -(2**31) + 1, dtype=torch.int32),
        )
        most: list[Tensor] = []
        for row in x:
            h = torch.tanh(row + h @ w)
            count = count * 6364136223846793005 + 1442695040888963407 if carried else count
            few = few + (h[:, 0] > 0)
            short, middle = short + 3001, middle * 3 + 1
            most.append(h.argmax(-1))
        return h, count, few, short, middle, torch.stack(most)

    agrees(run, torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8))


def saved_bytes(f: Callable[..., Tensor], *given: Tensor) -> int:
    """What a compiled function keeps for its backward pass."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(f, backend="tilewright", fullgraph=True)(*given)
    return sum(sizes)


def test_checkpointed_steps_save_their_states_alone() -> None:
    def step(row: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return h + 0.1 * torch.tanh(torch.sin((row + h) @ w).exp()) @ u

    def run(x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
        for row in x:
            made = checkpoint(step, row, h, w, u, use_reentrant=False)
            assert isinstance(made, Tensor)
            h = made
        return h

    given = torch.randn(STEPS, 32, 8), torch.randn(8, 256) / 3, torch.randn(256, 8) / 16, torch.randn(32, 8)
    wide = 32 * 256 * 4
    assert (
        saved_bytes(run, *(t.clone().requires_grad_() for t in given)) < STEPS * wide
    )  # several in each step without
    assert loops() == 1
    compiled = torch.compile(run, backend="tilewright", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, given), gradients(run, given), rtol=5e-5, atol=5e-6)


def test_functions_that_differ_are_two() -> None:
    def run(w: Tensor, h: Tensor) -> Tensor:
        for t in range(2 * STEPS):
            made = checkpoint(torch.sin if t < STEPS else torch.cos, h @ w, use_reentrant=False)
            assert isinstance(made, Tensor)
            h = made
        return h

    agrees(run, torch.randn(8, 8) / 3, torch.randn(3, 8), count=2, trains=False)


@pytest.mark.parametrize("draws", [dropped, disturbed])
@pytest.mark.parametrize("trains", [True, False])
def test_random_numbers_are_those_of_eager(draws: Callable[..., Tensor], trains: bool) -> None:
    def steps(h: Tensor, w: Tensor) -> Tensor:
        return draws(h, w, STEPS)

    given = torch.randn(3, 8), torch.randn(8, 8) / 3
    found: list[list[Tensor | None]] = []
    for f in (torch.compile(steps, backend="tilewright", fullgraph=True), steps):
        torch.manual_seed(5)
        with torch.set_grad_enabled(trains):
            found.append([*(gradients(f, given) if trains else [f(*given)]), torch.rand(4)])
    torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)
    assert loops() == 1 + trains


def test_steps_that_draw_random_numbers_are_a_loop_on_a_gpu_too() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        h = graph.placeholder("h")
        h.meta["example_value"] = value = torch.empty(3, 8, device="cuda")
        for _ in range(3 * STEPS):
            h = graph.call_function(F.dropout, (h, 0.3))
            h.meta["example_value"] = torch.empty_like(value)
            h = graph.call_function(torch.tanh, (h,))
            h.meta["example_value"] = torch.empty_like(value)
        graph.output((h,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert rolled.roll_loops(gm) is not gm


def test_what_counts_the_steps_of_a_loop_on_a_gpu_lies_there() -> None:
    """Else the loop is on both sides, and runs on the CPU."""
    graph = fx.Graph()
    with FakeTensorMode():
        h = graph.placeholder("h")
        h.meta["example_value"] = value = torch.empty(3, 8, device="cuda")
        for t in range(2 * STEPS):
            h = graph.call_function(torch.mul, (h, 0.1 * t if t % 2 else 2.0))
            h.meta["example_value"] = torch.empty_like(value)
            h = graph.call_function(torch.tanh, (h,))
            h.meta["example_value"] = torch.empty_like(value)
        graph.output((h,))
    made = rolled.roll_loops(fx.GraphModule(torch.nn.Module(), graph))
    makers = [n for n in made.graph.nodes if n.target in (torch.arange, torch.tensor)]
    assert makers and all(torch.device(n.kwargs["device"]).type == "cuda" for n in makers)
