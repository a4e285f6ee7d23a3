"""What forward passes save, and that backward passes make the same of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright
from tilewright import accuracy
from tilewright.capture.autograd import joint
from tilewright.capture.autograd.saved import save_sources


class Net(nn.Module):
    """Weights in bf16 beside activations, a softmax whose result is a single, a view that is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 64] to the same, and a view of what is saved."""
        h = F.gelu(self.first(x))
        s = torch.softmax(self.second(h), -1)
        return s * x, h.view(-1, 4, 32)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Tensors that each forward graph saves, before and after."""
    found: list[tuple[list[Tensor], list[Tensor]]] = []

    def seen(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
        before = tensors(forward, count)
        save_sources(forward, backward, count)
        found.append((before, tensors(forward, count)))
        names = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        (output,) = forward.graph.find_nodes(op="output")
        held = output.args[0][count:]
        assert sorted(a.name for a in held) == sorted(names[: len(held)])
        fixed = not any(isinstance(a.meta["val"], torch.SymInt) for a in held)
        assert not fixed or not any("aten.t." in str(a.target) for a in held)

    monkeypatch.setattr(joint, "save_sources", seen)
    return found


def tensors(forward: fx.GraphModule, count: int) -> list[Tensor]:
    (output,) = forward.graph.find_nodes(op="output")
    return [a.meta["val"] for a in output.args[0][count:] if isinstance(a.meta["val"], Tensor)]


def size_of(ts: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in ts)


def gradients(call: object, net: Net, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=net.first.weight.dtype is torch.float32):
        y, h = call(x)  # type: ignore[operator]
    (y.float().square().sum() + h.double().sum()).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None] + [x.grad]  # type: ignore[list-item]


def test_less_is_saved_and_gradients_are_right(saved: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 64)
    mine = gradients(torch.compile(net, backend=tilewright.backend), net, x)
    eager = gradients(net, net, x)
    exact = gradients(net.double(), net, x.double())
    for y, e, r in zip(mine, eager, exact, strict=True):
        assert accuracy.compare(y, e, r, k=accuracy.default_k(torch.bfloat16)).passed
    ((before, after),) = saved
    assert size_of(after) <= size_of(before) and len(after) == len(before)


def test_halves_are_saved_not_their_wider_forms() -> None:
    def forward(x: Tensor) -> list[Tensor]:
        half = torch.sin(x)
        wide = half.float()
        return [wide * 2, wide.t(), half, wide]

    def backward(transposed: Tensor, half: Tensor, wide: Tensor, tangent: Tensor) -> list[Tensor]:
        return [transposed @ tangent + half.float() @ wide]

    x = torch.randn(8, 8).bfloat16()
    first = make_fx(forward, tracing_mode="fake")(x)
    second = make_fx(backward, tracing_mode="fake")(x.float(), x, x.float(), x.float())
    (output,) = first.graph.find_nodes(op="output")
    places = second.graph.find_nodes(op="placeholder")
    for place, node in zip(places, output.args[0][1:], strict=False):
        place.name = place.target = node.name
    save_sources(first, second, 1)
    made = first(x)
    assert [t.dtype for t in made] == [torch.float32, torch.bfloat16], "one half stands for all three"
    wide = made[1].float()
    torch.testing.assert_close(second(made[1], x.float())[0], wide.t() @ x.float() + wide @ wide)


def test_unknown_sizes_stay_as_they_are(saved: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    net = Net()
    compiled = torch.compile(net, backend=tilewright.backend, dynamic=True)
    for rows in (8, 12):
        x = torch.randn(rows, 64)
        for y, e in zip(gradients(compiled, net, x), gradients(net, net, x), strict=True):
            torch.testing.assert_close(y, e, rtol=5e-2, atol=5e-2)


class Dropped(nn.Module):
    """Dropout and gelu in front of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 32] to the same."""
        return self.dropout(self.second(self.dropout(F.gelu(self.first(self.dropout(x))))))


@pytest.mark.parametrize("channels_last", [False, True])
def test_masks_are_saved_and_not_what_they_leave(
    saved: list[tuple[list[Tensor], list[Tensor]]], channels_last: bool
) -> None:
    """With one seed, a compiled step is eager's, and of dropout its mask alone is saved, of gelu its operand."""
    torch.manual_seed(0)
    net, x = Dropped(), torch.randn(6, 5, 7, 32)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    wanted, have = (step(net, call, x) for call in (net, torch.compile(net, backend="tilewright")))
    for a, b in zip(have, wanted, strict=True):
        torch.testing.assert_close(a, b)
    ((_, kept),) = saved
    large = [t for t in kept if t.numel() >= 6 * 5 * 7 * 32]
    assert sorted(str(t.dtype) for t in large) == ["torch.bool"] * 3 + ["torch.float32"] * 2


def step(net: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradients of one step with a fixed seed."""
    torch.manual_seed(1)
    net.zero_grad()
    x = x.detach().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), *(t.grad.clone() for t in (x, *net.parameters()) if t.grad is not None)]
