"""The native function of a call: what it takes for the same call, and what becomes of results, refusals and errors."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.options import Options
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.objects import known_call
from tilewright.runtime.objects.known_call import ARRANGED, TOGETHER, KnownCall, Question, native_call_of
from tilewright.runtime.store.cache import ContentStore, default_root

OTHER = object()
X = torch.arange(6.0).view(2, 3)


@pytest.fixture(autouse=True)
def _attached() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    options = Options()
    launchers(ContentStore(default_root(options)), options)
    kept = known_call._makers[:]
    yield
    known_call._makers[:] = kept


def known(
    *args: object,
    run: Callable[[list[Any]], list[Any] | None] = lambda args: args,
    asked: Sequence[Question] = (),
    alone: int = TOGETHER,
    **kwargs: object,
) -> Callable[..., object]:
    given = [(k, None) for k in range(len(args) + len(kwargs))]
    found = native_call_of(KnownCall(args, kwargs, asked, given, run, alone, list, OTHER))
    assert found is not None
    return found


OTHERS: dict[str, Callable[[], object]] = {
    "sizes": lambda: torch.zeros(3, 2),
    "rank": lambda: torch.zeros(6),
    "strides": lambda: torch.zeros(3, 2).t(),
    "type": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "device": lambda: torch.zeros(2, 3, device="meta"),
    "gradients": lambda: torch.zeros(2, 3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "negated": lambda: torch._neg_view(torch.zeros(2, 3)),
    "no memory": lambda: torch._efficientzerotensor((2, 3)),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "nothing": lambda: None,
    "number": lambda: 3,
    "array": lambda: torch.zeros(2, 3).numpy(),
    "list": lambda: [torch.zeros(2, 3)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_that_is_not_alike(name: str) -> None:
    ran = list[object]()
    call = known(X, run=lambda args: ran.append(args) or args)
    other = OTHERS[name]()
    for _ in range(2):
        assert call(other) is OTHER and not ran
    own = torch.ones(2, 3)
    assert call(own) == (own,)
    with torch.inference_mode():
        own = torch.ones(2, 3)
    assert call(own) == (own,)


def test_numbers_and_names() -> None:
    two, flag = 1234.5, object()
    call = known(X, two, flag=flag)
    assert call(X, two, flag=flag) == (X, two, flag)
    for args, named in (
        ((X, 1234.25), {"flag": flag}), ((X, two), {"flag": None}), ((X, two), {"other": flag}), ((X, two), {}),
        ((X, two, flag), {}), ((X,), {"flag": flag}), ((), {}), ((X, two, 3), {"flag": flag}),
    ):  # fmt: skip
        assert call(*args, **named) is OTHER
    other = X.clone()
    both = known(X, a=other, b=two)
    made = both(X, a=other, b=two)
    assert isinstance(made, tuple) and all(a is b for a, b in zip(made, (X, other, two), strict=True))
    assert both(X, b=two, a=other) is OTHER
    assert both(X, a=X, b=two) is OTHER  # one tensor twice: a program may ask


@pytest.mark.parametrize(
    "args",
    [
        (),
        (3,),
        (X, (X,)),
        (X, [X]),
        (X, {}),
        (X.to_sparse(),),
        (X.to(torch.complex64),),
        (torch._neg_view(X),),
    ],
)
def test_calls_that_have_no_function(args: tuple[object, ...]) -> None:
    assert native_call_of(KnownCall(args, {}, (), (), list, TOGETHER, list, OTHER)) is None


def test_without_a_native_side_there_is_none() -> None:
    known_call._makers.clear()
    assert native_call_of(KnownCall((X,), {}, (), [(0, None)], list, TOGETHER, list, OTHER)) is None


def test_what_is_given_and_returned() -> None:
    held, y = torch.ones(2), torch.zeros(2)
    seen = list[list[object]]()

    def run(args: list[Any]) -> list[Any]:
        seen.append(args[:])
        return args[::-1]

    for alone, wanted in ((TOGETHER, (X, held, y)), (ARRANGED, [X, held, y]), (0, X), (2, y)):
        call = native_call_of(
            KnownCall((X, y), {}, (), [(1, None), (-1, held), (0, None)], run, alone, list, OTHER)
        )
        assert call is not None
        found = call(X, y)
        assert type(found) is type(wanted)
        assert all(a is b for a, b in zip(found, wanted, strict=True)) if alone < 0 else found is wanted  # type: ignore[call-overload]
        assert all(a is b for a, b in zip(seen[-1], (y, held, X), strict=True))
    with pytest.raises(IndexError):
        known(X, alone=5)(X)


def test_what_is_asked() -> None:
    answers: dict[str, object] = {"plain": 1.5, "of": None}
    asked = [
        Question(lambda: answers["plain"], answers["plain"]),
        Question(lambda x: answers["of"] if x is X else 0, None, (X,)),
    ]
    call = known(X, asked=asked)
    assert call(X) == (X,)
    for name, other in (("plain", 2.5), ("of", False)):
        before = answers[name]
        answers[name] = other
        assert call(X) is OTHER
        answers[name] = before
        assert call(X) == (X,)


def test_a_run_that_does_not_serve() -> None:
    assert known(X, run=lambda args: None)(X) is OTHER


class _Interrupt(BaseException):
    pass


def _interrupted(*_: object) -> Any:
    raise _Interrupt


def test_errors_are_raised() -> None:
    """Also those of what is asked: an interrupt may come there."""
    for call in (known(X, run=_interrupted), known(X, asked=[Question(_interrupted)])):
        with pytest.raises(_Interrupt):
            call(X)
    arranged = native_call_of(KnownCall((X,), {}, (), [(0, None)], list, ARRANGED, _interrupted, OTHER))
    assert arranged is not None
    with pytest.raises(_Interrupt):
        arranged(X)


def test_nothing_is_kept_of_a_call() -> None:
    import gc
    import weakref

    call = known(X, run=lambda args: [t * 2 for t in args], alone=0)
    y = torch.ones(2, 3)
    result = call(y)
    assert isinstance(result, Tensor)
    seen = [weakref.ref(t) for t in (y, result)]
    del y, result
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
