"""Running sums from the end, which are read at turned places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.errors import IllegalSchedule
from tilewright.form.classes import make_form
from tilewright.form.compose import compose
from tilewright.form.turn_around import turn_around
from tilewright.ir.form import Form, are_at_own_place

Function = Callable[[Tensor], Tensor]


def from_the_end(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def weighed(x: Tensor) -> Tensor:
    return (from_the_end(x) * x).sum(-1)


def both_ways(x: Tensor) -> Tensor:
    """One sum, read at both of its ends."""
    behind = x.flip(-1).cumsum(-1)
    return behind + behind.flip(-1)


def form_of(run: Function) -> Form:
    graph = capture(run, [torch.empty(6, 40)])
    return make_form(one_kernel(graph), graph.layouts)


@pytest.mark.parametrize("run", [from_the_end, weighed])
def test_a_running_sum_is_read_at_its_own_place(run: Function) -> None:
    form = form_of(run)
    assert are_at_own_place(form)
    assert len([i for i in form.items if i.scan is not None]) == 1


def test_what_reads_both_ends_stays() -> None:
    graph = capture(both_ways, [torch.empty(6, 40)])
    plain = compose(one_kernel(graph), graph.layouts)
    assert turn_around(plain) is plain
    with pytest.raises(IllegalSchedule, match="read through a map"):
        form_of(both_ways)


def test_a_sum_from_the_front_stays() -> None:
    graph = capture(lambda x: x.cumsum(-1) * 2, [torch.empty(6, 40)])
    plain = compose(one_kernel(graph), graph.layouts)
    assert turn_around(plain) is plain


@pytest.mark.parametrize("run", [from_the_end, weighed, both_ways])
def test_the_meaning_stays(run: Function) -> None:
    x = torch.randint(-3, 4, (6, 40)).float()
    (ours,), _ = compiled(run, [x]).run([x])
    assert torch.equal(ours, run(x))
