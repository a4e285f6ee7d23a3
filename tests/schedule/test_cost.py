"""The price of a program follows what it does: trimmed loops, recomputation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.schedule.attention_parts import CAUSAL, PLAIN, qkv, score
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.normal_graph import Function
from tests.support.one_kernel import capture, one_kernel
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.form.classes import make_form
from tilewright.form.sides.join_words import join_words
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.cpu.cost import traffic
from tilewright.schedule.instructions import count_instructions
from tilewright.schedule.solver import Solver


def instructions(run: Callable[..., Tensor], length: int) -> float:
    """Vector instructions of attention over `length` queries and keys."""
    case = Case("attention", run, qkv(2, length, length, 64, 64))
    graph = capture(case, False)
    return count_instructions(
        Solver(host_target(), Options()).solve(one_kernel(graph), graph.layouts).program, 16, NO_HINTS
    )


@pytest.mark.parametrize("length", [1024, 2048])
def test_two_products_cost_two_products(length: int) -> None:
    products = 2 * 2 * length * length * 64 / 16
    assert 1.0 < instructions(PLAIN, length) / products < 1.5


def test_a_causal_mask_costs_half() -> None:
    whole, half = instructions(PLAIN, 2048), instructions(CAUSAL, 2048)
    assert 0.5 < half / whole < 0.6


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The causal mask as a sum with 0 or -inf, in front of a division."""
    hidden = torch.full((q.shape[-2], k.shape[-2]), float("-inf")).triu(1)
    s = (score(q, k) + hidden) / 1.5
    e = torch.exp((s - s.amax(-1, keepdim=True)) * (2 / 3))
    return (e @ v) / e.sum(-1, keepdim=True)


def test_a_mask_that_is_added_costs_half_too() -> None:
    assert 0.5 < instructions(added, 2048) / instructions(PLAIN, 2048) < 0.65


def tagging(x: Tensor, moves: Tensor) -> Tensor:
    """The best path through tags, step by step: each maximum reads the one before at every tag."""
    s = x[0]
    for step in x[1:]:
        s = (s[:, None] + moves).amax(0) + step
    return s


def test_folds_inside_folds_inside_folds_cost_all_their_steps() -> None:
    """A fold that another computes again at each of its steps is computed again as often as that one is."""

    def price(steps: int) -> float:
        graph = capture(Case("tags", tagging, ((steps, 4), (4, 4))), False)
        return Solver(host_target(), Options()).price(one_kernel(graph), graph.layouts)

    assert price(12) > 500 * price(4)


def test_a_chain_of_folds_is_cut_before_its_work_explodes() -> None:
    x, moves = torch.randn(24, 4), torch.randn(4, 4)
    compiled = tilewright.compile(tagging, (x, moves))
    assert len(compiled.kernels) > 2
    torch.testing.assert_close(compiled(x, moves), tagging(x, moves))


def unpacked(words: Tensor, x: Tensor) -> Tensor:
    """Sums of parts of words, each times a number."""
    parts = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return (parts.flatten(-2).float() * x).sum(-1)


@pytest.mark.parametrize("joined", [True, False])
def test_a_word_of_packed_numbers_is_moved_once(joined: bool) -> None:
    """Whether words and their parts are two classes or one."""
    rows, words = 4096, 16
    given = (torch.zeros(rows, words, dtype=torch.int32), torch.zeros(words * 8))
    graph = normalise(from_fx(trace(Function(unpacked), given, [(), ()]).gm))
    form = make_form(Kernel(graph.ops, (graph.ops[-1].output,)), {})
    form = join_words(form) if joined else form
    assert any(words * 8 == dims.static(a.extent) for a in form.classes()) == joined
    assert traffic(form, NO_HINTS) == 4 * (rows * words + words * 8 + rows)
