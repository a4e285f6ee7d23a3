"""Functions that torch stops compiling: each is warned of and counted, where our backend was asked for."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

import tilewright


@pytest.fixture(autouse=True)
def two_variants() -> Generator[None]:
    """Torch gives up at the third."""
    tilewright.reset()
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        yield
    torch._dynamo.reset()


class _Scaled(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((size,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def _doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def _called(fast: Callable[[Tensor], object], *sizes: int) -> None:
    for size in sizes:
        x = torch.arange(float(size))
        made = fast(x)
        assert isinstance(made, Tensor) and torch.equal(made, _doubled(x))


@pytest.mark.parametrize(
    "backend",
    ["tilewright", tilewright.backend, functools.partial(tilewright.backend, options={"fusion": "none"})],
    ids=["name", "function", "partial"],
)
def test_a_function_that_torch_gives_up_is_warned_of_once_and_counted(backend: str) -> None:
    fast = torch.compile(_doubled, backend=backend)
    _called(fast, 3, 4)
    assert tilewright.stats().given_up == 0
    with pytest.warns(RuntimeWarning, match="gave up compiling '_doubled'.*recompile_limit") as said:
        _called(fast, 5)
    assert len(said) == 1 and said[0].filename == __file__, "the warning shows the function"
    _called(fast, 6, 3)
    assert tilewright.stats().given_up == 1 and tilewright.stats().graphs == 2


def test_it_is_said_where_torch_says_nothing() -> None:
    said = logging.getLogger("torch._dynamo")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        fast = torch.compile(_doubled, backend="tilewright")
        with pytest.warns(RuntimeWarning, match="gave up compiling"):
            _called(fast, 3, 4, 5)
    finally:
        said.setLevel(level)


def test_one_class_of_modules_shares_the_limit() -> None:
    with pytest.warns(RuntimeWarning, match="gave up compiling 'forward'"):
        for n in (2, 3, 4):
            torch.compile(_Scaled(n), backend="tilewright")(torch.ones(n))


@pytest.mark.parametrize("around", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize(
    ("program", "name"), [(_doubled, "'_doubled'"), (torch.nn.Tanh(), "torch's own modules")]
)
def test_a_function_that_torch_meets_under_a_transform_is_given_up_and_warned_of(
    around: Callable[..., Callable[[Tensor], Tensor]], program: Callable[[Tensor], Tensor], name: str
) -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3)
    fast = torch.compile(program, backend="tilewright")
    with pytest.warns(
        RuntimeWarning, match=f"gave up compiling {name}: it was called under (vmap|grad)"
    ) as said:
        for _ in range(2):
            torch.testing.assert_close(around(fast)(x), around(program)(x))
            torch.testing.assert_close(fast(x), program(x))
    assert len(said) == 1 and tilewright.stats().given_up == 1 and tilewright.stats().graphs == 0


def test_transforms_inside_of_what_is_compiled_are_not_warned_of() -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = torch.compile(lambda x: torch.vmap(torch.nn.Tanh())(x), backend="tilewright")
        torch.testing.assert_close(fast(x), x.tanh())
    assert tilewright.stats().given_up == 0 and tilewright.stats().graphs == 1


def test_other_backends_and_errors_of_torch_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _called(torch.compile(_doubled, backend="eager"), 3, 4, 5)
        torch._dynamo.reset()
        strict = torch.compile(_doubled, backend="tilewright", fullgraph=True)
        _called(strict, 3, 4)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            strict(torch.ones(5))
    assert tilewright.stats().given_up == 0


def test_the_door_of_our_own_has_no_limit_and_takes_none_away() -> None:
    for size in (3, 4, 5, 6):
        fast = tilewright.compile(_doubled)
        _called(fast, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _called(torch.compile(_doubled, backend="tilewright"), 3, 4)
    assert tilewright.stats().given_up == 0 and tilewright.stats().graphs == 6


class _Rows(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


def test_another_module_of_a_class_has_sizes_of_its_own() -> None:
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        for x in (torch.randn(2, 3), torch.randn(4, 5)):
            model = tilewright.compile(_Rows(), (x,))
            torch.testing.assert_close(model(x), torch.softmax(x, -1))
            (graph,) = model.compilations
            assert not graph.trace["capture"].symbols()  # pyright: ignore
