"""What one native function reads of a call's inputs: the same as torch says, anew each time."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tilewright.capture.aliasing.apart import LieApart
from tilewright.options import Options
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.objects import reading
from tilewright.runtime.objects.reading import Lies, Reader, reader
from tilewright.runtime.store.cache import ContentStore, default_root


@pytest.fixture(autouse=True)
def _attached() -> None:
    options = Options()
    launchers(ContentStore(default_root(options)), options)


def reading_of(tensors: Sequence[Tensor], *, compare: bool = False) -> Reader:
    found = reader([
        Lies(k, k, tuple(t.shape), t.stride(), t.data_ptr() if compare else 0) for k, t in enumerate(tensors)
    ])  # fmt: skip
    assert found is not None
    return found


def addresses(read: Reader, args: list[object]) -> list[int] | None:
    row = array("Q", [1] * len(args))
    return list(row) if read(args, row.buffer_info()[0]) else None


def test_addresses_are_those_that_torch_says() -> None:
    base = torch.randn(4, 5, 6)
    tensors = [
        base, base[1:], base[:, ::2].permute(2, 0, 1), torch.nn.Parameter(base[0]), torch.empty(0, 3), torch.tensor(1),
        torch.ones(3).expand(2, 3), torch.randn(2, requires_grad=True), torch.randn(*[1] * 9),
    ]  # fmt: skip
    with torch.inference_mode():
        tensors.append(torch.randn(3))
    assert addresses(reading_of(tensors), list(tensors)) == [t.data_ptr() for t in tensors]


def test_strides_of_sizes_0_and_1_do_not_matter() -> None:
    read = reading_of([torch.randn(3, 1, 4)])
    assert addresses(read, [torch.randn(3, 9, 4).as_strided((3, 1, 4), (4, 77, 1))])
    assert not addresses(read, [torch.randn(4, 1, 3).permute(2, 1, 0)])
    assert addresses(reading_of([torch.empty(0, 4)]), [torch.empty(4, 0).t()])


@pytest.mark.parametrize(
    "other",
    [None, 3, "x", torch.randn(4), torch.randn(1, 2, 2), torch.nn.Linear, torch.randn(2, 2).to_sparse()],
)
def test_what_does_not_lie_so_is_left_to_python(other: object) -> None:
    read = reading_of([torch.randn(2, 2)])
    assert addresses(read, [other]) is None


def test_subclasses_are_left_to_python() -> None:
    """Whatever they hold: an object of theirs need not be laid out as a tensor."""

    class Mine(Tensor):
        pass

    assert addresses(reading_of([torch.randn(2)]), [torch.randn(2).as_subclass(Mine)]) is None


def test_memory_that_changes_is_seen() -> None:
    """An object may get other memory, or its tensor another object."""
    a, b = torch.randn(3), torch.randn(3)
    stand = reading_of([a, b], compare=True)
    assert stand([a, b], 0) and not stand([b, a], 0)
    a.set_(torch.randn(3).untyped_storage())
    assert not stand([a, b], 0)
    c, d = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3))
    stand = reading_of([c], compare=True)
    torch.utils.swap_tensors(c, d)
    assert not stand([c], 0) and stand([d], 0)
    d.data = torch.randn(3)
    assert not stand([d], 0)


def test_too_few_arguments_are_an_error() -> None:
    with pytest.raises(IndexError):
        addresses(reading_of([torch.randn(2), torch.randn(2)]), [torch.randn(2)])


def test_a_strange_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where objects hold their tensors otherwise, nothing native reads them."""
    kept = reading._makers[:]
    try:
        reading._makers.clear()
        monkeypatch.setattr(reading.Torch, "FUNCTIONS", ("no_such_function",))
        with pytest.raises(AttributeError):
            reading._torch()
        assert reader([]) is None
    finally:
        reading._makers[:] = kept


def _bytes_of(t: Tensor) -> set[int]:
    """The addresses of all bytes from the first element to the last one."""
    if not t.numel():
        return set()
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return set(range(t.data_ptr(), t.data_ptr() + reach * t.element_size()))


def test_what_is_seen_to_lie_apart_shares_no_byte() -> None:
    """Random parts of one storage: seen exactly if no written one shares a byte with another."""
    base, draw = torch.zeros(200), torch.Generator().manual_seed(0)
    found = [0, 0]
    for _ in range(300):
        number = [int(n) for n in torch.randint(0, 40, (12,), generator=draw)]
        tensors = [base[5 * number[k] : 5 * number[k] + number[k + 4] % 6] for k in range(4)]
        tensors.append(base.as_strided((2, 3), (number[8], 2), number[9]))
        written = [k for k in range(5) if number[k + 4] % 3 == 0]
        spans = list(map(_bytes_of, tensors))
        meet = any(spans[k] & spans[j] for k in written for j in range(5) if j != k)
        seen = LieApart(written, range(5))(list(tensors))
        assert seen is not meet
        found[seen] += 1
    assert min(found) > 50


def test_what_is_not_a_plain_tensor_is_not_seen_to_lie_apart() -> None:
    apart = LieApart((0,), (0, 1))
    assert apart([torch.zeros(3), torch.zeros(3)])
    assert not apart([torch.zeros(3), torch.zeros(3).to_sparse()])
    assert not apart([torch.zeros(3), None])
    same = torch.zeros(3)
    assert not apart([same, same])
