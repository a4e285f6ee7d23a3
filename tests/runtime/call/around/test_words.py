"""Variables of outer functions and the order of a class's bases are seen to change, by a native look at one word."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
from abc import ABC
from collections.abc import Callable
from types import CellType

import pytest
import torch
from torch import Tensor

from tilewright.options import Options
from tilewright.runtime.call.around import surroundings, words
from tilewright.runtime.call.around.held import ABSENT, comparer
from tilewright.runtime.call.around.reads import Look, Reads
from tilewright.runtime.call.around.surroundings import Surroundings
from tilewright.runtime.call.around.words import Word, word_of_attribute, word_of_cell
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.store.cache import ContentStore, default_root


@pytest.fixture(autouse=True)
def _attached() -> None:
    options = Options()
    launchers(ContentStore(default_root(options)), options)


def same_as(word: Word | None) -> Callable[[], bool]:
    assert word is not None
    found = comparer((), (), refer=(word,))
    assert found is not None
    return found


def test_a_variable_that_holds_another_object_or_nothing() -> None:
    first, second = object(), object()
    cell = CellType(first)
    same = same_as(word_of_cell(cell, first))
    assert same() and same()
    cell.cell_contents = second
    assert not same() and not same()
    cell.cell_contents = first
    assert same()
    del cell.cell_contents
    assert not same()
    assert word_of_cell(cell, first) is None, "it holds nothing"


def test_a_class_that_gets_other_bases() -> None:
    class First(ABC):  # noqa: B024
        pass

    class Second(ABC):  # noqa: B024
        pass

    class Kind(First):
        pass

    class Below(Kind):
        pass

    looks = [same_as(word_of_attribute(k, "__mro__", k.__mro__)) for k in (Kind, Below)]
    assert all(same() for same in looks)
    Kind.__bases__ = (Second,)
    assert not any(same() for same in looks)
    Kind.__bases__ = (First,)
    assert not any(same() for same in looks), "a tuple of its own, though equal"


def test_where_python_must_be_asked() -> None:
    class Meta(type):
        @property
        def __mro__(cls) -> tuple[type, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
            return (cls, int)

    class Kind(metaclass=Meta):
        pass

    assert word_of_attribute(Kind, "__mro__", Kind.__mro__) is None
    assert word_of_attribute(int, "__name__", int.__name__) is None
    assert word_of_attribute(object(), "__mro__", ABSENT) is None


def around(kind: type) -> Surroundings:
    """Of a program that multiplies by a variable and looks at a class."""
    scale = 2.0

    def program(x: Tensor) -> Tensor:
        return x * scale

    reads = Reads(looks={(id(kind), "__mro__"): Look(kind, "__mro__", kind.__mro__)})
    return Surroundings(program, reads)


@pytest.mark.parametrize("asks", [False, True], ids=["words", "Python"])
def test_surroundings_see_both(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By words, where nobody is asked, and where Python does not keep them so."""

    class First:
        pass

    class Second:
        pass

    class Kind(First):
        pass

    if asks:
        monkeypatch.setattr(words, "CELL_AT", 0)
        monkeypatch.setattr(words, "MRO_AT", 0)
    made = around(Kind)
    questions = [a.function for a in made.guards(frozenset())]
    assert (made._answers_stand in questions) == asks
    assert made.unchanged()
    ((cell, _),) = made._cells
    kept = cell.cell_contents
    cell.cell_contents = 3.0
    assert not made.unchanged() and not all(ask() for ask in questions)
    cell.cell_contents = kept
    assert made.unchanged() and all(ask() for ask in questions)
    Kind.__bases__ = (Second,)
    assert not made.unchanged() and not all(ask() for ask in questions)


def test_without_a_native_side_python_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "comparer", lambda *given: None)
    made = around(Word)
    ((cell, _),) = made._cells
    assert made.unchanged()
    cell.cell_contents = 3.0
    assert not made.unchanged()


def test_what_a_word_is_compared_with_is_kept() -> None:
    """An object that comes to lie where another one lay is not taken for it."""
    cell = CellType(torch.zeros(1))
    same = same_as(word_of_cell(cell, cell.cell_contents))
    cell.cell_contents = None
    gc.collect()
    for _ in range(50):
        cell.cell_contents = torch.zeros(1)
        assert not same()
