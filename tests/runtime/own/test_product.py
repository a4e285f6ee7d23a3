"""Products, convolutions and attention in native code against torch, on sizes that fit no tile."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright.ir.graph import LibraryCall
from tilewright.ir.ops.epilogue import activations
from tilewright.library.offers.offer import FrozenProduct, epilogues_of


def linear(weight: Tensor, bias: Tensor | None, x: Tensor, threads: int = 2) -> LibraryCall:
    made = products(threads)(FrozenProduct(weight, bias, sizes(x), sizes(F.linear(x, weight, bias))))
    assert made is not None
    return made


def close(ours: object, want: Tensor) -> None:
    assert isinstance(ours, Tensor) and ours.shape == want.shape
    torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-4)  # sums of size 20


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 95, 97, 200])
def test_any_number_of_rows_columns_and_inputs(rows: int) -> None:
    for columns, inner in itertools.product((1, 15, 33, 64, 200), (1, 7, 192, 193, 400)):
        x, w, b = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
        close(linear(w, b, x).function(x), F.linear(x.double(), w.double(), b.double()))


@pytest.mark.parametrize("rows", [1, 5, 97])
def test_rows_of_zeros_are_not_multiplied(rows: int) -> None:
    w, b = torch.randn(65, 400), torch.randn(65)
    for x in (torch.zeros(rows, 400), -torch.zeros(rows, 400)):
        assert torch.equal(linear(w, b, x).function(x), b.expand(rows, 65))  # type: ignore[arg-type]
        bare = linear(w, None, x).function(x)
        assert isinstance(bare, Tensor) and not bare.any() and not bare.signbit().any()
    x = torch.zeros(rows, 400)
    x[-1, -1] = torch.nan
    made = linear(w, b, x).function(x)
    assert isinstance(made, Tensor) and bool(made[-1].isnan().all())


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_a_single_row_is_summed_as_among_others(activation: str | None) -> None:
    for columns, inner in itertools.product((1, 31, 33, 65, 129, 300), (1, 127, 129, 400)):
        x, w, b = torch.randn(2, inner), torch.randn(columns, inner), torch.randn(columns)
        call = linear(w, b, x)
        for epilogue in epilogues_of(call) if activation else ():
            if epilogue.template is activations()[activation]:
                call = epilogue.make((), None)
        both, one = call.function(x), call.function(x[1:])
        assert isinstance(both, Tensor) and torch.equal(both[1:], one)  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", [64, 129, 512, 513, 1100])
def test_sums_that_leave_the_registers_are_those_that_an_activation_reads(inner: int) -> None:
    for rows, columns in itertools.product((2, 7, 100), (64, 96, 200)):
        x, w, b, y = (torch.randn(s) for s in ((rows, inner), (columns, inner), (columns,), (rows, columns)))
        call = linear(w, b, x)
        call = next(e.make((), None) for e in epilogues_of(call) if e.extra == "equal")
        made = next(e.make((), None) for e in epilogues_of(call) if e.template is activations()["relu"])
        plain, behind = call.function(x, y), made.function(x, y)
        close(plain, F.linear(x.double(), w.double(), b.double()) + y)
        assert isinstance(plain, Tensor) and torch.equal(plain.relu(), behind)  # type: ignore[arg-type]


def test_lazy_weights_are_packed_by_the_first_call_and_once() -> None:
    x, w = torch.randn(9, 70), torch.zeros(130, 70)
    made = products(2, pack_lazily=True)(FrozenProduct(w, None, sizes(x), sizes(F.linear(x, w))))
    assert made is not None
    first = w.normal_().clone()
    close(made.function(x), F.linear(x.double(), first.double()))
    w.zero_()
    close(made.function(x), F.linear(x.double(), first.double()))


@pytest.mark.parametrize("pack_lazily", [False, True])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (129, 69), (64, 35)])
def test_weights_that_are_not_finite_are_left_to_the_library(
    pack_lazily: bool, odd: float, place: tuple[int, int]
) -> None:
    x, w = torch.randn(9, 70), torch.randn(130, 70)
    w[place] = odd
    task = FrozenProduct(w, None, sizes(x), sizes(F.linear(x, w)))
    assert products(2, pack_lazily=pack_lazily)(task) is None
    strided = torch.randn(140, 130)[::2].t()
    strided[place] = odd
    assert products(2, pack_lazily=pack_lazily)(FrozenProduct(strided, None, sizes(x), task.shape)) is None


def test_strided_weights_and_inputs_are_taken_as_they_are() -> None:
    x, w = torch.randn(70, 60).t(), torch.randn(2, 70, 90).select(0, 1).t()
    close(linear(w, None, x).function(x), F.linear(x.double(), w.double()))


def test_an_empty_batch_has_an_empty_result() -> None:
    w = torch.randn(40, 30)
    assert linear(w, None, torch.randn(3, 30)).function(torch.empty(0, 30)).shape == (0, 40)  # type: ignore[attr-defined]


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    x, w = torch.randn(130, 500), torch.randn(300, 500)
    one, two, four = (linear(w, None, x, threads).function(x) for threads in (1, 2, 4))
    assert torch.equal(one, two) and torch.equal(one, four)  # type: ignore[arg-type]


def test_the_error_does_not_grow_as_in_one_long_sum() -> None:
    x, w = torch.randn(64, 4000), torch.randn(64, 4000)
    exact = x.double() @ w.double().t()
    ours = linear(w, None, x).function(x)
    assert isinstance(ours, Tensor)
    error, eager = ((t.double() - exact).square().mean().sqrt() for t in (ours, x @ w.t()))
    assert error <= 1.5 * eager


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((1, 1), 1, 0, 1),
        ((3, 3), 1, 1, 1),
        ((3, 3), 2, 1, 1),
        ((1, 1), 2, 0, 1),
        ((3, 2), 1, 2, 2),
        ((5, 5), 3, 4, 1),
    ],
)
@pytest.mark.parametrize("groups", [1, 32])
def test_convolutions(kernel: tuple[int, int], stride: int, padding: int, dilation: int, groups: int) -> None:
    w, b = torch.randn(32, 32 // groups, *kernel), torch.randn(32)
    for shape in [(1, 32, 12, 9), (3, 32, 5, 6), (2, 32, 25, 7)]:
        x = torch.randn(shape)
        want = F.conv2d(x.double(), w.double(), b.double(), stride, padding, dilation, groups)
        pair = (stride, stride), (padding, padding), (dilation, dilation)
        made = products(2)(FrozenProduct(w, b, sizes(x), sizes(want), *pair, groups))
        assert made is not None
        for given in (x, x.to(memory_format=torch.channels_last)):
            ours = made.function(given)
            close(ours, want)
            assert ours.is_contiguous(memory_format=torch.channels_last)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [(1, 0, 1, 1), (3, 0, 1, 1), (2, 2, 1, 1), (1, 3, 2, 1), (2, 1, 1, 32)],
)
def test_convolutions_over_lines(stride: int, padding: int, dilation: int, groups: int) -> None:
    """Without padding, all taps of a place are one run, which makes up for few channels."""
    for batch, channels, length, taps in [
        (1, 1, 90, 16),
        (3, 2, 31, 5),
        (2, 32, 12, 3),
        (2, 32, 9, 5),
        (4, 8, 1, 1),
    ]:
        channels = 32 if groups > 1 else channels
        if length + 2 * padding < dilation * (taps - 1) + 1:
            continue
        x, w, b = (
            torch.randn(batch, channels, length),
            torch.randn(32, channels // groups, taps),
            torch.randn(32),
        )
        want = F.conv1d(x.double(), w.double(), b.double(), stride, padding, dilation, groups)
        made = products(2)(
            FrozenProduct(w, b, sizes(x), sizes(want), (stride,), (padding,), (dilation,), groups)
        )
        short = channels < 8 and (padding or dilation > 1)
        assert (made is None) == bool(short)
        for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)) if made is not None else ():
            ours = made.function(given)  # type: ignore[union-attr]
            close(ours, want)
            assert ours.transpose(1, 2).is_contiguous()  # type: ignore[attr-defined]


def test_wide_kernels_of_one_line_in_images() -> None:
    for shape in [(2, 3, 4, 20), (1, 8, 3, 9)]:
        x, w = torch.randn(shape), torch.randn(32, shape[1], 1, 5)
        want = F.conv2d(x.double(), w.double(), stride=(1, 2))
        made = products(2)(FrozenProduct(w, None, sizes(x), sizes(want), (1, 2), (0, 0), (1, 1)))
        assert made is not None
        close(made.function(x), want)


def test_what_the_library_does_better_is_left_to_it() -> None:
    def ask(w: Tensor, groups: int = 1) -> LibraryCall | None:
        x = torch.randn(1, w.shape[1] * groups, 9, 9)
        pair = (1, 1), (0, 0), (1, 1)
        return products(2)(
            FrozenProduct(w, None, sizes(x), sizes(F.conv2d(x, w.float(), groups=groups)), *pair, groups)
        )

    assert ask(torch.randn(32, 1, 2, 2)) is None  # runs of two floats
    assert ask(torch.randn(32, 16, 3, 3), groups=2) is None
    assert ask(torch.randn(32, 16, 3, 3)) is not None
    assert ask(torch.randn(32, 16, 3, 3).double()) is None
    assert ask(torch.full((32, 16, 3, 3), float("inf"))) is None
