"""One of several ways to do a call: measured once for equal regions, with what each way can absorb."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.library_calls import agrees, calls, captured, fast, generated, products
from torch import nn
from torch._higher_order_ops.scan import scan

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims
from tilewright.library.choose import TimedOffer
from tilewright.library.select import select
from tilewright.library.specialise import specialise
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.normalise import normalise
from tilewright.target import PRESETS


class Fixed:
    """A timer that prefers a way, and writes down what it is asked."""

    def __init__(self, favourite: str, known: dict[str, str] | None = None) -> None:
        self.favourite = favourite
        self.known = known or {}
        self.asked: dict[str, list[TimedOffer]] = {}

    def size(self, e: Expr) -> int:
        return dims.evaluate(e, {s.value.name: 50 for s in dims.symbols_of(e)})  # type: ignore[union-attr]

    def known_choice(self, task: str) -> str | None:
        return self.known.get(task)

    def measure(self, task: str, candidates: Sequence[TimedOffer]) -> str:
        self.asked[task] = list(candidates)
        return self.favourite


def timed(graph: Graph, timer: Fixed) -> Graph:
    """The graph with the ways that `timer` prefers."""
    done = specialise(normalise(select(graph), interpret), PRESETS["x86-64-v4"], products(), timer)
    done.verify()
    return normalise(done, interpret)


def layers(count: int = 2, act: type[nn.Module] = nn.GELU) -> nn.Module:
    parts = [layer for _ in range(count) for layer in (nn.Linear(96, 96), act())]
    return nn.Sequential(*parts).eval()


@pytest.mark.parametrize(
    ("favourite", "name"),
    [("own", "linear"), ("onednn", "onednn.linear"), ("mkl", "mkl.linear"), ("plain", "mkl.linear")],
)
def test_the_favourite_is_taken_and_agrees(favourite: str, name: str) -> None:
    if "mkl" in name and not torch.backends.mkl.is_available():
        pytest.skip("torch without MKL")
    m, x = layers(), torch.randn(3, 50, 96)
    g = timed(captured(m, [x]), Fixed(favourite))
    assert calls(g) == [name, name]
    assert bool(generated(g)) == (name == "mkl.linear")  # which has no activations
    agrees(g, m, [x])


def test_equal_regions_are_measured_once() -> None:
    timer = Fixed("own")
    timed(captured(layers(4), [torch.randn(200, 96)]), timer)
    assert len(timer.asked) == 1
    timed(captured(layers(4, nn.SiLU), [torch.randn(200, 96)]), timer)
    assert len(timer.asked) == 2  # another activation, another region
    timed(captured(layers(4), [torch.randn(201, 96)]), timer)
    assert len(timer.asked) == 3


def test_a_known_choice_is_not_measured_again() -> None:
    m, x = layers(), torch.randn(200, 96)
    timer = Fixed("own")
    timed(captured(m, [x]), timer)
    (task,) = timer.asked
    again = Fixed("own", {task: "onednn"})
    assert calls(timed(captured(m, [x]), again)) == ["onednn.linear"] * 2
    assert not again.asked
    gone = Fixed("own", {task: "a way of another version"})
    assert calls(timed(captured(m, [x]), gone)) == ["linear"] * 2
    assert list(gone.asked) == [task]


def test_a_way_pays_for_what_it_cannot_absorb() -> None:
    timer = Fixed("own")
    timed(captured(layers(2, nn.ReLU), [torch.randn(200, 96)]), timer)
    (candidates,) = timer.asked.values()
    left = {e.name: sum(p.work for p in e.passes) for e in candidates}
    assert left["own"] == 0 < left["onednn"]  # whose relu hides NaN


class Recurrent(nn.Module):
    """A product, and a scan over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(96, 384), nn.Linear(384, 384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(h: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(self.again(h) + row)
            return h, h.clone()

        return scan(step, torch.zeros(2, 384), self.into(x))[1]


def test_calls_of_the_library_part_what_a_loop_could_be_joined_with() -> None:
    for layer, looped in [(Recurrent(), True), (nn.Linear(96, 384), False)]:
        timer = Fixed("own")
        timed(captured(layer.eval(), [torch.randn(100, 2, 96)]), timer)
        (candidates,) = timer.asked.values()
        assert {e.name: e.parts for e in candidates} == {
            e.name: looped and e.name != "own" for e in candidates
        }
        assert len(candidates) > 1


def test_a_pass_that_goes_into_another_kernel_costs_nothing() -> None:
    timer = Fixed("own")
    timed(
        captured(nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Softmax(-1)).eval(), [torch.randn(200, 96)]),
        timer,
    )
    assert timer.asked
    assert [e.passes for es in timer.asked.values() for e in es] == [()] * sum(map(len, timer.asked.values()))


def test_convolutions_and_attention_are_timed() -> None:
    m = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=32)).eval()
    x = torch.randn(2, 16, 12, 12)
    assert calls(timed(captured(m, [x]), Fixed("onednn"))) == ["onednn.convolution"] * 2
    assert calls(timed(captured(m, [x]), Fixed("own"))) == ["convolution"] * 2


def test_without_a_timer_the_first_way_is_taken() -> None:
    m, x = layers(), torch.randn(200, 96)
    assert calls(fast(captured(m, [x]), products())) == ["linear"] * 2
    assert calls(fast(captured(m, [x]))) == ["onednn.linear"] * 2


@pytest.mark.parametrize("known", [False, True])
def test_a_coarse_offer_is_a_way_only_where_there_is_no_other(known: bool) -> None:
    """With channels innermost the library sums all 1152 products of a result in one chain; eager does not."""
    for channels, groups, name in (
        (128, 1, "convolution"),
        (16, 1, "onednn.convolution"),
        (128, 2, "onednn.convolution"),
    ):
        module, x = nn.Conv2d(channels, 40, 3, groups=groups).eval(), torch.randn(1, channels, 7, 7)
        timer = Fixed("onednn")
        graph = timed(captured(module, (x,)), timer)
        if known:
            graph = timed(captured(module, (x,)), Fixed("own", dict.fromkeys(timer.asked, "onednn")))
        assert calls(graph) == [name]
