"""Windows that are written out: which ones, in how many lines, and results side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.unrolled_sums import unroll_sums
from tilewright.ir.expr import Axis, walk
from tilewright.ir.form import Form


def halves(*shape: int) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 and shape[1] > 1 else made


def depthwise(side: int, taps: int, dtype: torch.dtype = torch.float16) -> Form:
    run = lambda x, w: F.conv2d(x, w, None, 1, taps // 2, 1, 16)  # noqa: E731
    return form_of(run, (halves(1, 16, side, side).to(dtype), halves(16, 1, taps, taps).to(dtype)))


def form_of(run: Callable[..., object], given: Sequence[Tensor]) -> Form:
    graph = capture(run, given)
    return make_form(one_kernel(graph), graph.layouts)


def reads(form: Form) -> int:
    return len({x for i in form.items for b in i.body for x in walk(b) if x.op == "read"})


def columns(form: Form) -> Axis:
    return form.outputs[0].kept[-1]


def test_few_taps_leave_no_fold() -> None:
    form = depthwise(8, 3)
    made = unroll_sums(form, {columns(form): 1})
    assert not made.folds and len(made.outputs) == 1 and reads(made) == 18


def test_results_side_by_side_share_what_they_read() -> None:
    form = depthwise(8, 3)
    made = unroll_sums(form, {columns(form): 4})
    assert len(made.outputs) == 4 and reads(made) == 9 + 3 * (4 + 2)
    assert {str(o.kept[-1].extent) for o in made.outputs} == {"2"}


def test_large_windows_keep_a_loop_over_lines() -> None:
    form = depthwise(28, 7)
    made = unroll_sums(form, {columns(form): 4})
    assert len(made.folds) == len(made.outputs) == 4 and reads(made) == 7 + 4 + 6
    assert all([str(a.extent) for a in fold.reduce] == ["7"] for fold in made.folds.values())
    assert len({*form.classes(), *made.classes()}) == len(form.classes()) + 1, (
        "the new class has a name of its own"
    )


@pytest.mark.parametrize(
    "form",
    [
        depthwise(8, 3, torch.float32),
        depthwise(9, 9),
        form_of(lambda x, w: F.conv2d(x, w, None, 1, 1), (halves(1, 16, 8, 8), halves(8, 16, 3, 3))),
        form_of(lambda x: F.avg_pool2d(x, 3), (halves(1, 16, 9, 9),)),
        form_of(F.relu, (halves(1, 16, 9, 9),)),
    ],
    ids=["singles", "81 taps", "a product of matrices", "no products", "no fold"],
)
def test_others_stay(form: Form) -> None:
    assert unroll_sums(form, {}) is form


def test_numbers_that_do_not_divide() -> None:
    form = depthwise(9, 3)
    assert unroll_sums(form, {columns(form): 2}) is form


def test_lines_that_are_given_are_written_out_too() -> None:
    form = depthwise(28, 7)
    (fold,) = form.folds.values()
    made = unroll_sums(form, {columns(form): 2, fold.reduce[0]: 7})
    assert not made.folds and len(made.outputs) == 2 and reads(made) == 49 + 7 * (2 + 6)
