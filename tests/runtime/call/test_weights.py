"""Weights that change between calls, by every door: a call sees what they are now."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import tilewright


class Net(nn.Module):
    """A product, a kernel, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.second(torch.tanh(self.first(x)) * self.scale)) + x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def replaced(m: Net, x: Tensor) -> Tensor:
    m.first.weight = nn.Parameter(torch.randn(6, 6))
    return x


def data_swapped(m: Net, x: Tensor) -> Tensor:
    m.first.weight.data = torch.randn(6, 6)
    m.scale.data = torch.rand(12)[::2]
    return x


def written(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.second.bias.add_(1)
    return x


def memory_swapped(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.first.bias.set_(torch.randn(20).untyped_storage(), 3, (6,), (1,))
    return x


def resized(m: Net, x: Tensor) -> Tensor:
    """Grows and shrinks again: its memory is another one."""
    m.scale.resize_(1 << 18).resize_(6).fill_(0.25)
    return x


def turned(m: Net, x: Tensor) -> Tensor:
    m.second.weight.data = torch.randn(6, 6).t()
    return x


def retyped(m: Net, x: Tensor) -> Tensor:
    m.double()
    return x.double()


def retyped_alone(m: Net, x: Tensor) -> Tensor:
    m.scale.data = m.scale.bfloat16()
    return x


def broadcast_from_now_on(m: Net, x: Tensor) -> Tensor:
    m.first.bias.data = torch.randn(1)
    m.scale.data = torch.rand(3, 1)
    return x


def moved_and_back(m: Net, x: Tensor) -> Tensor:
    m.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for t in (*m.parameters(), *m.buffers()):
            t.uniform_(0.5, 1)
    return x


def loaded(m: Net, x: Tensor) -> Tensor:
    m.load_state_dict(Net().state_dict())
    return x


def loaded_by_assignment(m: Net, x: Tensor) -> Tensor:
    m.load_state_dict(Net().state_dict(), assign=True)
    return x


def parametrised(m: Net, x: Tensor) -> Tensor:
    parametrize.register_parametrization(m.first, "weight", Twice())
    return x


def untied(m: Net, x: Tensor) -> Tensor:
    m.second.weight = nn.Parameter(torch.randn(6, 6))
    return x


def objects_swapped(m: Net, x: Tensor) -> Tensor:
    torch._C._swap_tensor_impl(
        m.first.bias, nn.Parameter(torch.randn(6))
    )  # as `torch.utils.swap_tensors` does
    return x


def given_as_input(m: Net, x: Tensor) -> Tensor:
    """An input in the memory of a weight."""
    return m.first.weight.detach()[1:4]


def sizes_changed(m: Net, x: Tensor) -> Tensor:
    m.first, m.second = nn.Linear(5, 7), nn.Linear(7, 5)
    m.scale = torch.rand(7)
    return torch.randn(3, 5)


CHANGES = (
    replaced, data_swapped, written, memory_swapped, resized, turned, retyped, retyped_alone, broadcast_from_now_on,
    moved_and_back, loaded, parametrised, loaded_by_assignment, untied, objects_swapped, given_as_input, sizes_changed,
)  # fmt: skip

DOORS: dict[str, Callable[[Net], Callable[[Tensor], object]]] = {
    "torch.compile": lambda m: torch.compile(m, backend=tilewright.backend),
    "torch.compile, frozen": lambda m: torch.compile(m, backend=tilewright.backend, options={"freeze": True}),
    "tilewright.compile": lambda m: tilewright.compile(m),
    "tilewright.compile, frozen": lambda m: tilewright.compile(m, freeze=True),
}


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("door", DOORS)
def test_a_call_sees_what_weights_are_now(door: str, change: Callable[[Net, Tensor], Tensor]) -> None:
    m, x = Net().eval(), torch.randn(3, 6)
    fast = DOORS[door](m)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), m(x))
        x = change(m, x)
        for _ in range(3):
            wanted = copy.deepcopy(m)(x)
            torch.testing.assert_close(fast(x), wanted)
