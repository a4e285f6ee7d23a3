"""Torch's own loops and recurrent layers: one op each, with gradients through them."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tilewright
from tilewright.capture.loops.recurrent import SCANS_DIFFERENTIATE
from tilewright.tuning.thresholds import LOOPS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Generator[None]:
    """Nothing compiled before; torch's own tracer takes recurrent layers."""
    tilewright.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    tilewright.reset()


def loops() -> list[list[str]]:
    """The names of calls that are loops, of each graph."""
    return [[c.name for c in made.calls if c.name == "loop"] for made in tilewright.compilations()]


def walked(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    def step(h: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(part + h @ w)
        return h, h * 2

    return scan(step, h, x)


needs_gradients = pytest.mark.skipif(not SCANS_DIFFERENTIATE, reason="torch's gradient of a scan is wrong")


@needs_gradients
def test_a_scan_and_its_gradient_are_loops() -> None:
    w = (torch.randn(16, 16, dtype=torch.float64) / 4).requires_grad_()
    x, h = torch.randn(100, 3, 16, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    last, each = walked(x, h, w)
    (last.sum() + each.square().sum()).backward()
    wanted, w.grad = w.grad, None
    have = torch.compile(walked, backend="tilewright")(x, h, w)
    (have[0].sum() + have[1].square().sum()).backward()
    torch.testing.assert_close(have, (last, each))
    torch.testing.assert_close(w.grad, wanted)
    assert loops() == [["loop"], ["loop"]]
    assert max(c.coverage.ops for c in tilewright.compilations()) < 40


def test_a_while_loop_asks_before_its_first_step() -> None:
    def double(x: Tensor) -> tuple[Tensor, Tensor]:
        def goes(i: Tensor, x: Tensor) -> Tensor:
            return (i < 20) & (x.sum() < 100)

        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, x * 1.5 + 0.1

        return while_loop(goes, step, (torch.tensor(0), x))

    compiled = torch.compile(double, backend="tilewright")
    with torch.no_grad():
        for x in (torch.rand(5), torch.rand(5) + 100, torch.zeros(5)):
            torch.testing.assert_close(compiled(x), double(x))
    assert loops() == [["loop"]]


@pytest.mark.parametrize(
    ("kind", "how"),
    [(torch.nn.GRU, {}), (torch.nn.RNN, {"bidirectional": True}), (torch.nn.LSTM, {"proj_size": 4})],
)
def test_a_recurrent_layer_over_many_steps_is_a_loop(
    kind: type[torch.nn.RNNBase], how: dict[str, int]
) -> None:
    layer, x = kind(8, 12, **how), torch.randn(LOOPS.max_unrolled_steps + 6, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="tilewright")(x)[0], layer(x)[0])
    (made,) = loops()
    assert len(made) == (2 if how.get("bidirectional") else 1)


def test_a_layer_trains_through_its_loop() -> None:
    layer, x = torch.nn.GRU(8, 12), torch.randn(LOOPS.max_unrolled_steps + 6, 3, 8)
    layer(x)[0].square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = None
    torch.compile(layer, backend="tilewright")(x)[0].square().sum().backward()
    for p, want in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-5)
    assert loops() == [["loop"], ["loop"]]


def test_weights_in_one_piece_of_memory_are_a_loop() -> None:
    """As layers for a GPU have them."""
    layer, x = torch.nn.GRU(8, 12), torch.randn(LOOPS.max_unrolled_steps + 6, 3, 8)
    flat, at = torch.cat([p.detach().reshape(-1) for p in layer.parameters()]), 0
    for p in layer.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="tilewright")(x)[0], layer(x)[0])
    assert loops() == [["loop"]]


@pytest.mark.parametrize("layer", [torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_without_biases_is_a_loop(layer: type[torch.nn.GRU] | type[torch.nn.RNN]) -> None:
    model, x = layer(4, 6, bias=False), torch.randn(70, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="tilewright")(x), model(x))
    assert loops() == [["loop"]]


@needs_gradients
def test_a_trained_lstm_is_a_loop_and_torch_need_not_be_told() -> None:
    layer, x = torch.nn.LSTM(4, 3, batch_first=True), torch.randn(2, LOOPS.max_unrolled_steps + 1, 4)
    with torch._dynamo.config.patch(allow_rnn=False):
        made, (last, _) = tilewright.compile(layer)(x)  # type: ignore[misc]
    wanted, (end, _) = layer(x)
    weights = list(layer.parameters())
    ours = torch.autograd.grad(made.square().sum() + last.sum(), weights)
    theirs = torch.autograd.grad(wanted.square().sum() + end.sum(), weights)
    torch.testing.assert_close((made, ours), (wanted, theirs))
    assert loops() == [["loop"], ["loop"]]
