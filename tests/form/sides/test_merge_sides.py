"""All classes on a side of products as one: which ones, in which order, and what keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.sides.merge_sides import merge_sides
from tilewright.form.sides.walk_sums import walk_sums
from tilewright.ir.expr import axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims


def halves(*shape: int, nchw: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 and not nchw else made


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, None, 1, 1)


def form_of(
    run: Callable[..., object], given: Sequence[Tensor], dynamic: Sequence[dict[int, str]] = ()
) -> Form:
    graph = capture(run, given, dynamic)
    return make_form(one_kernel(graph), graph.layouts)


def sides(form: Form) -> tuple[list[str], list[str]]:
    """The extents of kept classes and of folded ones."""
    (fold,) = form.folds.values()
    return [str(a.extent) for a in fold.kept], [str(a.extent) for a in fold.reduce]


def offsets(form: Form) -> list[str]:
    (fold,) = form.folds.values()
    return [str(offset) for _, offset in fold.accesses()]


def test_places_are_rows_and_taps_are_summed() -> None:
    form = merge_sides(form_of(convolved, (halves(2, 64, 14, 14), halves(128, 64, 3, 3))))
    assert sides(form) == (["392", "128"], ["576"])
    image, weight = offsets(form)
    assert weight == "((c2 * 576) + c9)", "sums lie in the order of the weight in memory"
    assert "(c8 * 64)" in image, "steps of one place are as before"
    assert "(c9 % 192)" in image, "the channels of three taps lie one behind the other"
    (output,) = form.outputs
    assert str(output.offset) == "(c2 + (c8 * 128))"


def test_few_channels_stand_outside_of_taps() -> None:
    """Where lines of the image lie in memory, so do those of the weight."""
    form = merge_sides(form_of(convolved, (halves(2, 3, 8, 8, nchw=True), halves(16, 3, 3, 3, nchw=True))))
    image, weight = offsets(form)
    assert weight == "((c2 * 27) + c9)" and "(c9 % 3)" in image and "((c9 // 9) * 64)" in image


def test_the_image_decides_where_the_weight_lies_across() -> None:
    form = merge_sides(form_of(convolved, (halves(2, 64, 8, 8), halves(16, 64, 3, 3, nchw=True))))
    image, weight = offsets(form)
    assert "(c9 % 192)" in image and "((c9 % 64) * 9)" in weight


def test_groups_are_a_batch() -> None:
    run = lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 4)  # noqa: E731
    form = merge_sides(form_of(run, (halves(2, 64, 5, 5), halves(96, 16, 3, 3))))
    assert sorted(sides(form)[0]) == ["24", "4", "50"] and sides(form)[1] == ["144"]


def test_an_unknown_batch_is_outermost() -> None:
    given = (halves(2, 16, 5, 5, nchw=True), halves(32, 16, 3, 3, nchw=True))
    form = merge_sides(form_of(convolved, given, [{0: "n"}, {}]))
    (kept, folded) = sides(form)
    assert folded == ["144"] and any("* 25" in e for e in kept) and len(kept) == 2


@pytest.mark.parametrize(
    ("run", "given", "dynamic"),
    [
        (convolved, (halves(2, 16, 5, 5, nchw=True), halves(32, 16, 3, 3, nchw=True)), [{3: "w"}, {}]),
        (lambda x, w: convolved(x, w).softmax(1), (halves(2, 16, 5, 5), halves(32, 16, 3, 3)), ()),
        (
            lambda x, w, v: convolved(x, w) * F.conv2d(x, v),
            (halves(2, 16, 5, 5), halves(32, 16, 3, 3), halves(32, 16, 1, 1)),
            (),
        ),
        (lambda x: F.avg_pool2d(x, 3), (halves(2, 16, 6, 6),), ()),
        (lambda x, w: x @ w, (halves(5, 6), halves(6, 7)), ()),
    ],
    ids=["unknown width", "a fold behind it", "other taps", "no product", "one class each"],
)
def test_others_stay(
    run: Callable[..., object], given: Sequence[Tensor], dynamic: Sequence[dict[int, str]]
) -> None:
    form = form_of(run, given, dynamic)
    assert merge_sides(form) is form


# --- steps of sums ---------------------------------------------------------------


def merged(channels: int) -> Form:
    return merge_sides(form_of(convolved, (halves(2, channels, 9, 9), halves(32, channels, 3, 3))))


def test_a_step_is_in_one_tap() -> None:
    form = merged(64)
    (k,) = next(iter(form.folds.values())).reduce
    made = walk_sums(form, {k: 32})
    (fold,) = made.folds.values()
    steps, within = fold.reduce
    assert (dims.static(steps.extent), dims.static(within.extent)) == (18, 32)
    conditions = [x for b in fold.body for x in walk(b) if x.op in ("ge", "lt", "floordiv", "mod")]
    assert conditions and not any(axis(within) in axes_of(x) for x in conditions)


@pytest.mark.parametrize(("channels", "length"), [(64, 128), (24, 16), (64, 576), (3, 16)])
def test_steps_of_several_taps_are_as_they_were(channels: int, length: int) -> None:
    form = merged(channels)
    (k,) = next(iter(form.folds.values())).reduce
    assert walk_sums(form, {k: length}) is form


def test_sums_without_taps_are_as_they_were() -> None:
    form = merge_sides(
        form_of(lambda x, w: F.conv2d(x, w, None, 2), (halves(2, 64, 9, 9), halves(32, 64, 1, 1)))
    )
    (k,) = next(iter(form.folds.values())).reduce
    assert walk_sums(form, {k: 32}) is form
