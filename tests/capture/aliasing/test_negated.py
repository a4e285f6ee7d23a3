"""Tensors that torch keeps negated (the imaginary part of a conjugate): their memory holds the other sign."""

# The short name of such a view has an underscore.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, fx, nn

import tilewright
from tilewright.capture.aliasing.negated import around_negated
from tilewright.capture.opaque import Runner

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "computed": lambda z: z.conj().imag.sin() + 1,
    "returned": lambda z: torch.view_as_real(z.exp()).add(0).sum() + (z * 2).conj().imag,
    "view of a view": lambda z: (z * 2).conj().imag[1:].unsqueeze(0) * 3,
    "by place": lambda z: (z * 2).conj().imag.as_strided((2,), (2,), 1) * 3,
}


def negated(n: int = 4) -> Tensor:
    """A tensor kept negated."""
    return torch.randn(n, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize("name", PROGRAMS)
def test_views_inside_of_a_program(name: str) -> None:
    """The imaginary part of a conjugate has its sign."""
    z = torch.randn(4, dtype=torch.complex64)
    fast = torch.compile(PROGRAMS[name], backend="tilewright")
    torch.testing.assert_close(fast(z), PROGRAMS[name](z))


def test_gradients() -> None:
    """Forward and backward passes read the sign too."""

    def of(x: Tensor, y: Tensor) -> Tensor:
        return torch.complex(x, y).conj().imag.exp() * 2

    given, same = torch.randn(2, 4).unbind(), torch.randn(4)
    pairs = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    for call, (x, y) in zip((of, torch.compile(of, backend="tilewright")), pairs, strict=True):
        call(x, y).backward(torch._neg_view(same))
    for eager, ours in zip(*pairs, strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)


def test_gradients_are_given_back_while_a_pass_runs() -> None:
    """What looks for the sign does not hold them until the end."""
    gm = fx.symbolic_trace(lambda tangents_1: tangents_1)
    (place,) = gm.graph.find_nodes(op="placeholder")
    place.meta["val"] = torch.empty(3)

    def runner(args: list[object]) -> list[object]:
        held = weakref.ref(args[0])
        args.clear()
        return [held() is None]

    def build(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        return runner

    run = around_negated(build)(gm, "backward", {})
    assert run([torch.ones(3)]) == [True]
    assert run([torch._neg_view(torch.ones(3))]) == [True]


def test_what_comes_in_and_is_written() -> None:
    """Arguments are read as what they show, and what is written into them stays so."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a.sum() + b.sum()

    fast = torch.compile(step, backend="tilewright")
    a, b = negated(), torch._neg_view(torch.randn(4))
    held = a.clone()
    torch.testing.assert_close(fast(a, b), held.sum() * 2 + b.sum())
    torch.testing.assert_close(a, held * 2)


def test_short_ways_and_receivers() -> None:
    """A model that has seen a plain tensor reads a negated one, and fills one."""

    def twice(x: Tensor) -> Tensor:
        return x * 2

    plain, other = torch.randn(4), torch._neg_view(torch.randn(4))
    fast = tilewright.compile(twice, (plain,))
    for x in (plain, other, plain, negated()):
        torch.testing.assert_close(fast(x), x * 2)
    for _ in range(2):
        out = torch._neg_view(torch.zeros(4))
        fast(plain, out=out)
        torch.testing.assert_close(out, plain * 2)


class Scaled(nn.Module):
    """A buffer that is kept negated."""

    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch._neg_view(torch.arange(1.0, 5.0)))

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return x * self.b


@pytest.mark.parametrize("freeze", [False, True])
def test_weights(freeze: bool) -> None:
    """Constants and weights, also of an exported program."""
    model, x = Scaled().eval(), torch.randn(4)
    fast = tilewright.compile(model, (x,), freeze=freeze)
    program = tilewright.compile(torch.export.export(model, (x,)), freeze=freeze)
    for given in (x, negated(), x):
        torch.testing.assert_close(fast(given), model(given))
        torch.testing.assert_close(program(given), model(given))


def zeros_without_memory() -> Tensor:
    """What torch makes for tangents that are zero: it has no memory at all."""
    return torch._efficientzerotensor((3, 2))


def test_zeros_without_memory_inside_of_a_program() -> None:
    """Derivatives of derivatives bring them in; a kernel that read them ended the process."""

    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def curvature(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda z: model(z).squeeze(-1)))(x).square().mean()

    gradients = []
    for call in (curvature, torch.compile(curvature, backend="tilewright")):
        call(torch.linspace(-1, 2, 66).reshape(33, 2)).backward()
        gradients.append(model[0].weight.grad)
        model.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_zeros_without_memory_from_outside() -> None:
    """They come in as plain zeros, and later calls may bring others."""
    fast = torch.compile(lambda x, y: (x + 1, x * y), backend="tilewright")
    for x in (zeros_without_memory(), torch.ones(3, 2), zeros_without_memory()):
        for ours, eager in zip(fast(x, torch.full((3, 2), 2.0)), (x + 1, x * 2), strict=True):
            torch.testing.assert_close(ours, eager + torch.zeros(3, 2))
    whole = tilewright.compile(lambda x: x + 1, (zeros_without_memory(),))
    assert whole(zeros_without_memory()).tolist() == whole(torch.zeros(3, 2)).tolist() == [[1.0, 1.0]] * 3
