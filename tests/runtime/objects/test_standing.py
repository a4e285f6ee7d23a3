"""Words of tensors: every kind of change is seen, and what cannot be looked at so is not taken for unchanged."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor, nn

from tilewright.options import Options
from tilewright.runtime.call.around.surroundings import Surroundings
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.objects import reading
from tilewright.runtime.objects import standing as words
from tilewright.runtime.objects.known_call import KnownCall, native_call_of
from tilewright.runtime.objects.standing import StandingTensors, find_words, standing
from tilewright.runtime.store.cache import ContentStore, default_root


@pytest.fixture(autouse=True)
def _attached() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    options = Options()
    launchers(ContentStore(default_root(options)), options)
    kept = words._makers[:]
    yield
    words._makers[:] = kept


def looking_at(*tensors: Tensor, counted: bool = False) -> StandingTensors:
    places = range(len(tensors))
    found = standing(places, frozenset(places) if counted else frozenset())
    assert found is not None
    return found


OTHER = torch.arange(24.0)
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "memory": lambda t: setattr(t, "data", OTHER.view(2, 3, 4)),
    "sizes": lambda t: setattr(t, "data", t.data.view(3, 2, 4)),
    "rank": lambda t: setattr(t, "data", t.data.view(6, 4)),
    "strides": lambda t: setattr(t, "data", t.data.transpose(0, 1).contiguous().transpose(0, 1)),
    "strides in place": lambda t: t.transpose_(0, 1),
    "start": lambda t: setattr(t, "data", t.data[1:]),
    "start in place": lambda t: t.set_(t.untyped_storage(), 4, (2, 2, 4), (8, 4, 1)),
    "type": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "type of one size": lambda t: setattr(t, "data", t.data.to(torch.float16)),
    "negated": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "no memory": lambda t: setattr(t, "data", torch._efficientzerotensor((2, 3, 4))),
    "resized": lambda t: t.resize_(40),
    "storage": lambda t: t.untyped_storage().resize_(1 << 14),
    "set": lambda t: t.set_(OTHER.view(2, 3, 4)),
    "swapped": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen(name: str) -> None:
    t = nn.Parameter(torch.arange(24.0).view(2, 3, 4).clone(), requires_grad=False)
    found = looking_at(t)
    assert not found.still([t])  # nothing is noted yet
    for _ in range(2):
        assert found.note([t]) and found.still([t]) and found.still([t])
    CHANGES[name](t)
    assert not found.still([t])
    found.note([t])
    assert found.still([t])


def test_writes_are_seen_where_they_count() -> None:
    t = torch.zeros(3)
    free, counted = looking_at(t), looking_at(t, counted=True)
    assert free.note([t]) and counted.note([t])
    t.add_(1)
    assert free.still([t]) and not counted.still([t])
    assert counted.note([t]) and counted.still([t])


def test_one_of_several() -> None:
    tensors = [torch.zeros(3) for _ in range(5)]
    found = standing((1, 3))
    assert found is not None and found.note(list(tensors))
    tensors[0] = tensors[2] = torch.ones(4)
    assert found.still(list(tensors))
    assert not found.still([*tensors[:3], torch.zeros(3), tensors[4]])


class _Mine(Tensor):
    pass


@pytest.mark.parametrize("other", [None, 3, torch.zeros([1] * 6), torch.zeros(2).as_subclass(_Mine)])
def test_what_cannot_be_noted_never_stands(other: object) -> None:
    t = torch.zeros(3)
    found = looking_at(t, t)
    assert not found.note([t, other]) and not found.still([t, other])
    assert found.note([t, t]) and found.still([t, t])


def test_too_few_arguments() -> None:
    found = looking_at(torch.zeros(2))
    assert not found.still([])  # a call that lacks one is another call
    with pytest.raises(IndexError):
        found.note([])


def test_what_one_has_noted_another_takes() -> None:
    t = torch.zeros(3)
    old, new = looking_at(t), looking_at(t)
    assert old.note([t])
    t.data = torch.ones(3)
    assert new.note([t]) and not old.still([t])
    old.take(new)
    assert old.still([t])


def test_where_words_stand() -> None:
    """What is read there is what torch says."""
    found, t = find_words(), torch.randn(4, 5)[1:, ::2]
    assert found is not None
    for _ in range(3):
        t.zero_()

    def word(address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    storage = word(t._cdata + found.storage)
    assert (
        storage == t.untyped_storage()._cdata and word(storage + found.data) == t.untyped_storage().data_ptr()
    )
    assert word(t._cdata + found.form) == t.dim() and word(t._cdata + found.keys) == reading.keys_of(t)
    counter = word(t._cdata + found.counter)
    assert ctypes.c_uint32.from_address(counter + found.writes).value == t._version


class _Library:
    """One whose functions make nothing."""

    attached = 0

    def tw_attach_words(self, _: object) -> None:
        self.attached += 1

    tw_stand = ctypes.pythonapi.PyList_AsTuple
    tw_note = ctypes.pythonapi.PyList_AsTuple


def test_without_words_nothing_is_looked_at_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are known to Python then, which asks all of it."""
    monkeypatch.setattr(words, "_counter", lambda: None)
    assert find_words() is None
    library = _Library()
    words.attach(library)  # pyright: ignore[reportArgumentType]
    assert not library.attached and standing((0,)) is None and not words.is_at_hand()
    call = KnownCall((torch.zeros(2),), {}, (), (), lambda args: args, -1, tuple, None)
    assert native_call_of(call) is None
    module = nn.Linear(2, 2).requires_grad_(False)
    around = Surroundings(module)
    assert around.unchanged() and [ask.function for ask in around.guards(frozenset())] == [around.unchanged]
    module.weight.data = torch._neg_view(module.weight.data)
    assert not around.unchanged()


@pytest.mark.parametrize("blind", ["still", "note", "writes"])
def test_a_trial_that_fails_is_the_end_of_it(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that do not tell of every change are not looked at."""
    plain = words.standing

    def otherwise(places: tuple[int, ...], counted: frozenset[int] = frozenset()) -> StandingTensors | None:
        found = plain(places, frozenset() if blind == "writes" else counted)
        if found is None or blind == "writes":
            return found
        return StandingTensors(
            (lambda args: True) if blind == "still" else found.still,
            (lambda args: False) if blind == "note" else found.note,
            found.noted,
        )

    assert words._stands_well()
    monkeypatch.setattr(words, "standing", otherwise)
    assert not words._stands_well()


def test_surroundings_see_tensors_with_more_dims() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn([2] * 6), requires_grad=False)
    around = Surroundings(module)
    for change in (
        lambda: torch.randn([2] * 6),
        lambda: module.weight.data.transpose(0, 5),
        lambda: torch.ones(2),
    ):
        assert around.unchanged() and around.unchanged()
        wanted = change()
        moved = wanted.shape == module.weight.shape and wanted.stride() == module.weight.stride()
        module.weight.data = wanted
        assert around.unchanged() is moved
        if not moved:
            around = Surroundings(module)
