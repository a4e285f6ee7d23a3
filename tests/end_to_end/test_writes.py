"""Programs that write into their inputs, against eager: values, what inputs hold, whose memory results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import IndexOutOfRange
from tilewright.runtime.stats import STATS

CACHE = ((1, 2, 16, 8), (1, 2, 16, 8), (1, 2, 1, 8), (1, 2, 1, 8))
Make = Callable[[int], tuple[object, ...]]
T = torch.randn


def shifted(x: Tensor) -> Tensor:
    x[1:] = x[1:] + x[:-1]
    return x.sum(0)


def swapped(x: Tensor, y: Tensor) -> None:
    a, b = x + 1, y * 2
    x.copy_(b)
    y.copy_(a)


def overlapping(x: Tensor, y: Tensor) -> Tensor:
    x[1:4] = y
    x[2:5] = y * 2
    return x.sum(0)


def read_between(x: Tensor, y: Tensor) -> Tensor:
    a = x[0] * 1
    x[0] = y
    b = x[0] * 2
    x[0] = a + b
    return b


def itself(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def a_view(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)[1:]


def two_inputs(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    v = z * 2
    x.copy_(v)
    y.copy_(v)
    return v


def repeated_places(c: Tensor, k: Tensor, at: Tensor) -> Tensor:
    c[:, at] = k
    return c * 2


def added_places(c: Tensor, k: Tensor, at: Tensor) -> Tensor:
    c.index_put_((at,), k, accumulate=True)
    return c + 1


def from_itself(c: Tensor, at: Tensor) -> Tensor:
    c[at] = c.flip(0)
    return c + 1


def scattered(c: Tensor, at: Tensor, k: Tensor) -> Tensor:
    c.scatter_(1, at, k)
    return c * 2


def moved_on(x: Tensor, k: Tensor) -> Tensor:
    x[:-1] = x[1:].clone()
    x[-1] = k
    return x * 2


def doubled(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return y * 2


def beside(x: Tensor, y: Tensor) -> Tensor:
    x[1:] += y[:-1]
    return y * 2


def attended(k: Tensor, v: Tensor, q: Tensor, new: Tensor, at: Tensor) -> Tensor:
    k.index_copy_(2, at, new)
    v.index_copy_(2, at, new * 2)
    mask = (torch.arange(16) <= at)[None, None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def put_line(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    c[:, :, at] = k * w
    return (c * 2).sum(-1)


def two_lines(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    c.index_copy_(2, at, k * w)
    c.index_copy_(2, at + 1, k - w)
    return c[:, 1] * 2


def line_read_elsewhere(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    n = torch.sin(k * w)
    c.index_copy_(2, at, n)
    return n.sum(-1), c * 2


def old_lines_shown(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    before = c * 1
    c.index_copy_(2, at, k * w)
    return before, c + w


def line_of_the_old(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    c.index_copy_(2, at, c[:, :, 2:3] * w + k)
    return c + w


def place_moved_on(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    c.index_copy_(2, at, k * w)
    at.add_(1)
    return c.sum(2)


def line_for_all(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    c[:, :, at] = w
    return c + 1


def computed_place(c: Tensor, at: Tensor, k: Tensor, w: Tensor) -> Tensor:
    n = k * w
    c.index_copy_(2, (n.sum() * 0).long()[None] + at, n)
    return c + 1


LINE = (put_line, two_lines, line_read_elsewhere, old_lines_shown, line_of_the_old, place_moved_on, line_for_all,
        computed_place)  # fmt: skip


def _line(n: int) -> tuple[Tensor, ...]:
    return T(2, 3, 9, 8), torch.tensor([n + 2]), T(2, 3, 1, 8), T(8)


def _line_of_turned(n: int) -> tuple[Tensor, ...]:
    return T(9, 2, 8, 3).permute(1, 3, 0, 2), torch.tensor([n - 1]), T(2, 1, 3, 8).transpose(1, 2), T(8)


def _line_of_halves(n: int) -> tuple[Tensor, ...]:
    return tuple(t.bfloat16() if t.is_floating_point() else t.int() for t in _line(n))


def _line_of_free_sizes(n: int) -> tuple[Tensor, ...]:
    return T(2 + n, 3, 9 + n, 8), torch.tensor([n + 2]), T(2 + n, 3, 1, 8), T(8)


def _shared(n: int) -> tuple[Tensor, ...]:
    x = T(8, 6)
    return (x, x) if n == 1 else (x, T(8, 6))


def _part_of_it(n: int) -> tuple[Tensor, ...]:
    x = T(8, 6)
    return (x, x[2:4]) if n == 1 else (x, T(2, 6))


def _meeting(n: int) -> tuple[Tensor, ...]:
    base = T(100)
    return (base[:48].view(8, 6), base[6:54].view(8, 6)) if n == 1 else (T(8, 6), T(8, 6))


PROGRAMS: dict[str, tuple[Callable[..., object], Make]] = {
    "shifted": (shifted, lambda n: (T(64, 8 + n),)),
    "swapped": (swapped, lambda n: (T(64 + n, 6), T(64 + n, 6))),
    "overlapping parts": (overlapping, lambda n: (T(64 + n, 6), T(3, 6))),
    "read between": (read_between, lambda n: (T(6, 6 + n), T(6 + n))),
    "the input itself": (itself, lambda n: (T(4, 8 + n), T(4, 8 + n))),
    "a view of it": (a_view, lambda n: (T(4, 8 + n), T(4, 8 + n))),
    "one value, two inputs": (two_inputs, lambda n: (T(4, 6), T(4, 6), T(4, 6))),
    "places that repeat": (repeated_places, lambda n: (T(2, 16, 8), T(2, 3, 8), torch.tensor([3, 3, -1]))),
    "sums at places": (added_places, lambda n: (T(16, 8), T(3, 8), torch.tensor([3, 3, -1]))),
    "from itself": (from_itself, lambda n: (T(16, 8), torch.randperm(16))),
    "scattered": (scattered, lambda n: (T(4, 16), torch.randint(0, 16, (4, 3)), T(4, 3))),
    "moved on": (moved_on, lambda n: (T(40 + n, 8), T(8))),
    "gaps": (itself, lambda n: (T(8, 12 + n)[:, 2:7], T(8, 5))),
    "columns": (itself, lambda n: (T(8, 6 + n).t(), T(6 + n, 8))),
    "no elements": (itself, lambda n: (T(0, 5), T(0, 5))),
    "given twice": (doubled, _shared),
    "a part of it given": (doubled, _part_of_it),
    "inputs that meet": (beside, _meeting),
    **{f"a line: {f.__name__}": (f, _line) for f in LINE},
    "a line of a turned tensor": (put_line, _line_of_turned),
    "a line of halves": (put_line, _line_of_halves),
    "a line, free sizes": (put_line, _line_of_free_sizes),
    "a cache": (attended, lambda n: (*map(T, CACHE), torch.tensor([4 + n]))),
}  # fmt: skip


def _tensors(x: object) -> list[Tensor]:
    return [t for t in (x if isinstance(x, (tuple, list)) else (x,)) if isinstance(t, Tensor)]


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _sharing(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[list[bool]]:
    return [[r.numel() > 0 and _storage(r) == _storage(x) for x in inputs] for r in results]


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.filterwarnings("ignore:a program was called with inputs that it writes")
def test_as_eager(name: str) -> None:
    """Three calls, of other sizes or other memory."""
    program, make = PROGRAMS[name]
    torch.compiler.reset()
    compiled = torch.compile(program, backend="tilewright")
    for n in (0, 1, 0):
        torch.manual_seed(n)
        ours = make(n)
        torch.manual_seed(n)
        theirs = make(n)
        made, eager = _tensors(compiled(*ours)), _tensors(program(*theirs))
        for a, b in zip([*made, *_tensors(ours)], [*eager, *_tensors(theirs)], strict=True):
            assert a.shape == b.shape and (a.stride() == b.stride() or not a.numel())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert _sharing(made, _tensors(ours)) == _sharing(eager, _tensors(theirs))


def test_a_place_outside_writes_nothing() -> None:
    torch.compiler.reset()
    compiled = torch.compile(repeated_places, backend="tilewright")
    cache = T(2, 16, 8)
    compiled(cache, T(2, 3, 8), torch.tensor([1, 2, -16]))
    before = cache.clone()
    for at in ([1, 2, 16], [-17, 1, 2]):
        with pytest.raises(IndexOutOfRange):
            compiled(cache, T(2, 3, 8), torch.tensor(at))
        assert torch.equal(cache, before)
    compiled(cache, T(2, 3, 8), torch.tensor([1, 2, 3]))
    assert not torch.equal(cache, before)


@pytest.mark.parametrize("program", [put_line, line_for_all])
def test_a_kernel_stores_a_line_where_data_say(program: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    tilewright.reset()
    compiled = torch.compile(program, backend="tilewright", dynamic=False)
    given = _line(1)
    compiled(*given)
    (made,) = tilewright.compilations()
    assert not made.calls and not made.coverage.need
    cache = given[0].clone()
    with pytest.raises(IndexOutOfRange):
        compiled(given[0], torch.tensor([9]), *given[2:])
    assert torch.equal(given[0], cache)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 3, 1, 4), (2, 1, 4)])
def test_what_is_no_line_is_refused(sizes: tuple[int, ...]) -> None:
    """Torch's fake kernels take it, eager does not."""

    def put(c: Tensor, at: Tensor, k: Tensor) -> Tensor:
        c[:, at] = k
        return c.sum(1)

    torch.compiler.reset()
    compiled, cache = torch.compile(put, backend="tilewright"), T(3, 8, 4)
    before = cache.clone()
    for run in (put, compiled):
        with pytest.raises(RuntimeError, match="shape mismatch: value tensor"):
            run(cache, torch.tensor([2]), T(*sizes))
        assert torch.equal(cache, before)


def test_lines_are_checked_where_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "1")
    for name in ("a line: put_line", "a line of a turned tensor", "a line: two_lines"):
        test_as_eager(name)


def test_torch_learns_of_what_kernels_store() -> None:
    """Autograd refuses what was saved and then written."""
    torch.compiler.reset()
    compiled = torch.compile(itself, backend="tilewright")
    x, w = T(4, 8), T(4, 8, requires_grad=True)
    loss = (w * x).sum()
    with torch.no_grad():
        version = x._version
        compiled(x, T(4, 8))
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_statistics_of_a_batch_norm_are_not_copied() -> None:
    torch.compiler.reset()
    STATS.reset()
    ours, theirs = (torch.nn.BatchNorm1d(6).double() for _ in range(2))
    compiled = torch.compile(ours, backend="tilewright")
    for k in range(3):
        torch.manual_seed(k)
        x = T(5, 6, dtype=torch.float64)
        for module in (compiled, theirs):
            module(x.clone().requires_grad_()).square().sum().backward()
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert (STATS.writes_in_place, STATS.writes_copied) == (3, 0)
