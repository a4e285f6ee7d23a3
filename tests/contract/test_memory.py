"""What eager promises about memory, kept: strides, offsets, overlaps, mutation, and who owns an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

import tilewright

Program = Callable[..., object]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def both(program: Program, *inputs: Tensor) -> tuple[object, object, list[Tensor], list[Tensor]]:
    """Results of eager and of the compiled program on copies of the inputs that keep their strides, and the copies."""
    mine = [clone(t) for t in inputs]
    theirs = [clone(t) for t in inputs]
    with torch.no_grad():
        wanted = program(*theirs)
        got = torch.compile(program, backend="tilewright")(*mine)
    return got, wanted, mine, theirs


def clone(t: Tensor) -> Tensor:
    """A copy with the same strides and the same offset from the start of its storage."""
    base = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).clone()
    return torch.as_strided(base, t.shape, t.stride(), t.storage_offset())


def same(got: object, wanted: object) -> None:
    """Values, shapes, dtypes and strides agree."""
    if isinstance(wanted, (tuple, list)):
        assert isinstance(got, (tuple, list)) and len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            same(a, b)
        return
    assert isinstance(got, Tensor) and isinstance(wanted, Tensor)
    torch.testing.assert_close(got, wanted)
    moving = [k for k, n in enumerate(wanted.shape) if n > 1]
    assert [got.stride()[k] for k in moving] == [wanted.stride()[k] for k in moving]


def norm(x: Tensor) -> Tensor:
    """A program with two reductions and elementwise work."""
    return torch.softmax(x * 2 + 1, -1)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "size-1 strides": lambda: torch.randn(6, 8).as_strided((6, 1, 8), (8, 77, 1)),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset 1": lambda: torch.randn(513)[1:].view(16, 32),
    "misaligned": lambda: torch.randn(2051)[3:].view(32, 64),
    "transposed": lambda: torch.randn(7, 9).t(),
    "expanded": lambda: torch.randn(7, 1).expand(7, 9),
    "sliced rows": lambda: torch.randn(9, 20)[::2, 3:15],
    "empty": lambda: torch.randn(0, 5),
    "one element": lambda: torch.randn(1, 1),
}


@pytest.mark.parametrize("kind", list(INPUTS))
def test_inputs_of_any_layout(kind: str) -> None:
    got, wanted, *_ = both(norm, INPUTS[kind]())
    same(got, wanted)


@pytest.mark.parametrize("kind", list(INPUTS))
def test_a_graph_compiled_for_another_layout(kind: str) -> None:
    x = INPUTS[kind]()
    compiled = tilewright.compile(norm)
    with torch.no_grad():
        compiled(torch.randn(x.shape))
        torch.testing.assert_close(compiled(x), norm(x))
        torch.testing.assert_close(compiled(x), norm(x))


def test_offsets_are_not_guarded() -> None:
    base = torch.randn(600)
    compiled = torch.compile(norm, backend="tilewright")
    before = tilewright.stats().graphs
    with torch.no_grad():
        for offset in range(8):
            x = base[offset : offset + 512].view(16, 32)
            torch.testing.assert_close(compiled(x), norm(x))
    assert tilewright.stats().graphs == before + 1


def test_output_strides_are_those_of_eager() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + 1, (y * 2).t(), (y + 1).t().contiguous(), torch.relu(y.t())

    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got, wanted, *_ = both(program, x, torch.randn(5, 7))
    same(got, wanted)


RETURNED: dict[str, Program] = {
    "the input itself": torch.alias_copy,
    "the input in two forms": lambda x: (torch.alias_copy(x), x.clone(), x.contiguous()),
    "a library's result": lambda x: x.index_add(1, torch.tensor([0]), x[:, :1]),
    "a kernel's result": lambda x: ((x + 1).contiguous(), x + 1, torch.t_copy(x[0, 0])),
}


@pytest.mark.parametrize("name", list(RETURNED))
def test_each_output_has_its_own_strides(name: str) -> None:
    """One value may be returned in several forms, and a copy of an input lies as the copy, not as the input."""
    got, wanted, *_ = both(RETURNED[name], torch.randn(2, 5, 4, 6).permute(0, 2, 1, 3))
    same(got, wanted)


WHOLE_NUMBERS: dict[str, Program] = {
    "average": lambda x: torch.nn.functional.avg_pool2d(x, 2),
    "average by a divisor": lambda x: torch.nn.functional.avg_pool2d(x, 2, divisor_override=3),
    "remainder": lambda x: x.fmod(3),
    "range": lambda x: torch.arange(0, 5, 2.5, dtype=torch.int64) + x.sum(),
    "range of halves": lambda x: torch.arange(0.5, 7.7, 1.5, dtype=torch.int32) + x.sum(),
}


@pytest.mark.parametrize("name", list(WHOLE_NUMBERS))
def test_whole_numbers_are_generated(name: str) -> None:
    got, wanted, *_ = both(WHOLE_NUMBERS[name], torch.randint(-9, 9, (1, 2, 4, 4)))
    same(got, wanted)
    assert not tilewright.stats().fallbacks


def test_overlapping_inputs_one_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    one, two = torch.arange(8.0), torch.arange(8.0)
    with torch.no_grad():
        wanted = program(one[:4], one[2:6])
        got = torch.compile(program, backend="tilewright")(two[:4], two[2:6])
    same(got, wanted)
    same(two, one)


def test_overlapping_inputs_that_are_read() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    base = torch.arange(9.0)
    with torch.no_grad():
        same(torch.compile(program, backend="tilewright")(base[:6], base[3:]), base[:6] + base[3:])


def test_an_input_passed_twice_and_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    one, two = torch.randn(5), torch.empty(5)
    two.copy_(one)
    with torch.no_grad():
        wanted = program(one, one)
        got = torch.compile(program, backend="tilewright")(two, two)
    same(got, wanted)
    same(two, one)


def test_mutation_of_a_view() -> None:
    def program(x: Tensor) -> Tensor:
        x[1:3].add_(1)
        x.t()[0].zero_()
        return x.sum(0)

    got, wanted, mine, theirs = both(program, torch.randn(4, 5))
    same(got, wanted)
    same(mine, theirs)


def test_two_inputs_swapped_in_place() -> None:
    def program(x: Tensor, y: Tensor) -> None:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)

    _, _, mine, theirs = both(program, torch.randn(4), torch.randn(4))
    same(mine, theirs)


def test_an_output_that_is_an_input() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + y

    x, y = torch.randn(3), torch.randn(3)
    with torch.no_grad():
        got = torch.compile(program, backend="tilewright")(x, y)
    assert got[0] is x
    same(got[1], x + y)


def test_an_output_returned_twice() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    x = torch.randn(3)
    with torch.no_grad():
        one, two = torch.compile(program, backend="tilewright")(x)
    one.zero_()
    assert two.abs().sum() == 0


@pytest.mark.parametrize("entry", ["torch.compile", "tilewright.compile", "export"])
def test_copies_own_their_memory(entry: str) -> None:
    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            return x.clone(), y, y.clone(), y.contiguous() + 0, self.weight.clone()

    module, x = Copies(), torch.randn(4)
    if entry == "torch.compile":
        compiled = torch.compile(module, backend="tilewright")
    elif entry == "export":
        compiled = tilewright.compile(torch.export.export(module, (x,)))
    else:
        compiled = tilewright.compile(module)
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x)
            same(got, module(x))
            pointers = [t.data_ptr() for t in (*got, x, module.weight)]
            assert len(set(pointers)) == len(pointers)


def test_results_outlive_later_calls() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x @ x, -1)
        return y.t(), (y @ x).relu()

    compiled = torch.compile(program, backend="tilewright")
    with torch.no_grad():
        inputs = [torch.randn(6, 6) for _ in range(4)]
        results = [compiled(x) for x in inputs]
        for x, got in zip(inputs, results, strict=True):
            same(got, program(x))


def test_views_of_intermediates() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 3
        return y[1:], y.view(-1), y.t()[:2], y.unsqueeze(0).expand(4, -1, -1)

    got, wanted, *_ = both(program, torch.randn(3, 4))
    same(got, wanted)


def _written(x: Tensor) -> Tensor:
    """A tensor whose column was written through its transpose: the program makes it as the transpose of another."""
    y = x * 2
    y.t()[1].neg_()
    return y


def _part_of_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _written(x)
    return y[:2], y


def _flat_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _written(x)
    return y.view(2, 8), y


def _two_parts_of_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _written(x)
    return y[1:], y[:3]


@pytest.mark.parametrize("program", [_part_of_written, _flat_written, _two_parts_of_written])
def test_views_of_a_transposed_result_share_its_memory(program: Program) -> None:
    got, wanted, _, _ = both(program, torch.randn(4, 4))
    same(got, wanted)
    for pair in (got, wanted):
        cast("tuple[Tensor, Tensor]", pair)[0].fill_(7.0)
    same(got, wanted)


def test_buffers_are_updated_in_training() -> None:
    mine, theirs = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    compiled = torch.compile(mine, backend="tilewright")
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5)
        same(compiled(x).detach(), theirs(x).detach())
    for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


SHOWN_BY_CALLS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a part of a complex value": lambda a: (torch.view_as_complex(a), torch.view_as_complex(a).imag),
    "a part in other bits": lambda a: (a, a.view(torch.int32)[1:]),
    "two parts in other bits": lambda a: (a.view(torch.int32)[1:], a.view(torch.int32).view(torch.float32)),
    "nothing of it": lambda a: (a, a.view(torch.int32)[1:].clone()),
}


@pytest.mark.parametrize("name", list(SHOWN_BY_CALLS))
def test_who_writes_into_a_result_sees_it_in_what_calls_show_of_it(name: str) -> None:
    got, wanted, *_ = both(lambda x: SHOWN_BY_CALLS[name](x * 2), torch.randn(4, 6, 2))
    same(got, wanted)
    for first, _ in (cast(tuple[Tensor, Tensor], got), cast(tuple[Tensor, Tensor], wanted)):
        first.zero_()
    same(got, wanted)
    assert not tilewright.stats().fallbacks
