"""Ops of plain numbers, with tensors without dims in their place: values, types and gradients are the op's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer
from torch import Tensor, fx

from tilewright.capture.loops.numbers.activations import ACTIVATIONS
from tilewright.capture.loops.numbers.losses import LOSSES
from tilewright.capture.loops.numbers.places import takes_number, twin_of
from tilewright.capture.loops.numbers.twins import TWINS

__all__ = ["fewer"]

STEPS = 12

X, Y, Z = torch.linspace(-2, 2, 17), torch.linspace(1, 3, 17), torch.linspace(3, -1, 17)
A, B = torch.randn(4, 5), torch.randn(5, 6)
AT = torch.tensor([1, 3])

CALLS: dict[str, tuple[Callable[..., Tensor], tuple[object, ...], Mapping[str, float]]] = {
    "add": (torch.add, (X, Y), {"alpha": 0.3}),
    "sub": (torch.sub, (X, Y), {"alpha": 0.3}),
    "rsub": (torch.rsub, (X, Y), {"alpha": 0.3}),
    "lerp": (torch.lerp, (X, Y), {"weight": 0.7}),
    "addcmul": (torch.addcmul, (X, Y, Z), {"value": 0.3}),
    "addcdiv": (torch.addcdiv, (X, Z, Y), {"value": 0.3}),
    "addmm": (torch.addmm, (torch.randn(6), A, B), {"beta": 0.3, "alpha": 0.7}),
    "baddbmm": (torch.baddbmm, (torch.randn(1, 4, 6), A[None], B[None]), {"alpha": 0.7}),
    "nothing added": (torch.addmm, (torch.full((6,), torch.nan), A, B), {"beta": 0.0}),
    "masked_fill": (torch.masked_fill, (X, X > 1), {"value": 0.3}),
    "index_fill": (torch.index_fill, (X, 0, AT), {"value": 0.3}),
    "scatter": (torch.scatter, (X, 0, AT), {"value": 0.3}),
    "clamp": (torch.clamp, (X,), {"min": -0.5, "max": 1.0}),
    "clamp_min": (torch.clamp_min, (X,), {"min": 0.25}),
    "clamp_max": (torch.clamp_max, (X,), {"max": 0.3}),
    "pad": (F.pad, (X, (1, -2)), {"value": 0.3}),
    "leaky_relu": (F.leaky_relu, (X,), {"negative_slope": 0.3}),
    "elu": (F.elu, (X * 20,), {"alpha": 0.3}),
    "celu": (F.celu, (X,), {"alpha": 0.25}),
    "softplus": (F.softplus, (X * 20,), {"beta": 0.7}),
    "softplus below 0": (F.softplus, (X * 20,), {"beta": -0.7}),
    "huber_loss": (F.huber_loss, (X, Y), {"delta": 0.3}),
    "smooth_l1_loss": (F.smooth_l1_loss, (X, Y), {"beta": 0.3}),
    "threshold": (F.threshold, (X,), {"threshold": 0.5, "value": 0.3}),
    "hardtanh": (F.hardtanh, (X,), {"min_val": -0.5, "max_val": 1.0}),
    "hardshrink": (F.hardshrink, (X,), {"lambd": 0.5}),
    "softshrink": (F.softshrink, (X,), {"lambd": 0.5}),
    "layer_norm": (F.layer_norm, (A, (5,), torch.randn(5), torch.randn(5)), {"eps": 0.3}),
    "rms_norm": (F.rms_norm, (A, (5,), torch.randn(5)), {"eps": 0.3}),
}


def result_of(f: Callable[..., Tensor], *args: object, **more: object) -> Tensor:
    """What a call makes."""
    return f(*args, **more)


def result(
    f: Callable[..., Tensor], args: tuple[object, ...], wide: torch.dtype, **more: object
) -> list[Tensor]:
    """What a call makes of operands of this type, and their gradients."""
    given = [
        x.to(wide).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args
    ]
    made = f(*given, **more)
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    weights = torch.linspace(1, 2, made.numel(), dtype=torch.float32).reshape(made.shape)
    return [made.detach(), *torch.autograd.grad((made.float() * weights).sum(), leaves)]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_twin_makes_what_the_op_makes(name: str, kind: torch.dtype) -> None:
    op, args, numbers = CALLS[name]
    twin = (TWINS | ACTIVATIONS | LOSSES)[op]
    assert set(numbers) <= set(twin.numbers)
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    have, want = (
        result(twin.function, args, kind, **tensors, kind=kind),
        result(op, args, kind, **numbers),
    )
    units = 16 * torch.finfo(kind).eps
    torch.testing.assert_close(have, want, rtol=units, atol=units, equal_nan=True)


def test_integers_stay_integers() -> None:
    x, two = torch.arange(-5, 5, dtype=torch.int32), torch.tensor(2)
    calls: tuple[tuple[Callable[..., Tensor], tuple[object, ...], str], ...] = (
        (torch.add, (x, x), "alpha"),
        (torch.clamp, (x,), "max"),
        (torch.masked_fill, (x, x > 0), "value"),
        (F.pad, (x, (1, 1)), "value"),
    )
    for op, args, number in calls:
        made = TWINS[op].function(*args, **{number: two}, kind=torch.int32)
        torch.testing.assert_close(made, result_of(op, *args, **{number: 2}), rtol=0, atol=0)


def test_only_the_numbers_of_a_twin_may_change() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(F.pad, (x, (1, 2), "constant", 0.5))
    node.meta["example_value"] = X
    assert [takes_number(node, p) for p in range(1, 5)] == [False, False, False, True]
    node = graph.call_method("lerp", (x, x, 0.5))
    node.meta["example_value"] = X
    assert twin_of(node, frozenset({2})) is not None and twin_of(node, frozenset()) is None


STEP: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "scaled": lambda h, y, t: torch.sub(torch.add(h, y, alpha=0.1 * t), y, alpha=1 / (t + 1)).lerp(
        y, 0.05 * t
    ),
    "products": lambda h, y, t: torch.addmm(y, h, h, beta=0.0 if t % 3 else 0.5, alpha=0.1 * t),
    "chosen": lambda h, y, t: torch.where(y > 0, 0.1 * t, h).masked_fill(y < -1, float(t)).where(y < 2, t),
    "limited": lambda h, y, t: F.hardtanh(h.clamp(max=0.1 * t), -0.1 * t, 1.0 + t),
    "padded": lambda h, y, t: F.pad(h, (1, -1), value=0.1 * t),
    "bent": lambda h, y, t: F.softplus(F.elu(F.leaky_relu(h, 0.01 * t), 0.1 * t), 1.0 + t),
    "bent either way": lambda h, y, t: F.softplus(h, 0.2 * (t - 3)).clamp(-9, 9),
    "written": lambda h, y, t: (
        (h + y).lerp_(y, 0.1 * t).masked_fill_(y > 1, t) + torch.empty_like(y).fill_(0.1 * t)
    ),
}


@pytest.mark.parametrize("name", STEP)
def test_steps_of_other_numbers_are_a_loop(name: str) -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.sin(STEP[name](h, y, t))
        return h

    agrees(run, torch.randn(8, 8), torch.randn(8, 8), trains=name in ("scaled", "limited"))


def test_halves_are_computed_as_the_op_computes_them() -> None:
    """Limits are rounded to the type before they are compared, and factors are not."""

    def run(h: Tensor) -> Tensor:
        kept = torch.zeros_like(h)
        for t in range(STEPS):
            kept = kept + F.hardshrink(h, 0.1 * t)
            h = torch.add(h, h, alpha=-0.01 * t)
        return kept

    x = torch.linspace(-1, 1, 21).half()
    with torch.no_grad():
        have = torch.compile(run, backend="tilewright", fullgraph=True)(x)
        torch.testing.assert_close(have, run(x), rtol=2e-3, atol=1e-3)
