"""One graph for all sizes: dynamic dims by every entry point, random sizes, no recompile, no guard from our side."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import InputError


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def encoder(x: Tensor, w: Tensor) -> Tensor:
    """A projection, attention of rows on rows, a norm: (batch, length, 8) to the same."""
    h = torch.nn.functional.layer_norm(x @ w, (8,))
    scores = torch.softmax(h @ h.transpose(1, 2) / 8**0.5, -1)
    return torch.nn.functional.gelu(scores @ h) + x


def column(x: Tensor) -> Tensor:
    """Sums over the dynamic dim, and a view that merges it."""
    return x.sum(0) + x.reshape(-1)[:3].sum() + x.flatten(0, 1).amax(0).sum()


def pairs(count: int, low: int = 2) -> list[tuple[int, int]]:
    """Random sizes."""
    draw = random.Random(1)
    return [(draw.randint(low, 9), draw.randint(low, 70)) for _ in range(count)]


def test_fifty_random_sizes_one_graph() -> None:
    compiled = torch.compile(encoder, backend="tilewright")
    w = torch.randn(8, 8)
    with torch.no_grad():
        for count, (b, s) in enumerate(pairs(50)):
            x = torch.randn(b, s, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            if count:
                with torch.compiler.set_stance("fail_on_recompile"):
                    got = compiled(x, w)
            else:
                got = compiled(x, w)
            torch.testing.assert_close(got, encoder(x, w), atol=1e-5, rtol=1e-4)
    found = tilewright.stats()
    assert found.graphs == 1 and found.units <= 1
    assert found.plan_misses == len(set(pairs(50)))


def test_forward_and_backward_share_one_graph_each() -> None:
    compiled = torch.compile(encoder, backend="tilewright")
    for count, (b, s) in enumerate(pairs(8)):
        x, w = torch.randn(b, s, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        wanted = torch.autograd.grad(encoder(x, w).square().mean(), (x, w))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("fail_on_recompile" if count else "default"):
            got = torch.autograd.grad(compiled(x, w).square().mean(), (x, w))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert tilewright.stats().graphs == 2


@pytest.mark.parametrize("program", [encoder, column], ids=lambda f: f.__name__)
def test_named_dims(program: Callable[..., Tensor]) -> None:
    second = [torch.randn(8, 8)] if program is encoder else []
    compiled = tilewright.compile(program, dims={"x": {0: "batch", 1: ("length", 2, 512)}})
    for b, s in pairs(6):
        x = torch.randn(b, s, 8)
        for _ in range(2):
            torch.testing.assert_close(compiled(x, *second), program(x, *second), atol=1e-5, rtol=1e-4)
    assert tilewright.stats().graphs == 1


def test_sizes_zero_and_one_share_the_graph_when_asked() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * 2

    graphs = {}
    for dims in ({"x": {0: "n"}}, "oblivious"):
        tilewright.reset()
        compiled = tilewright.compile(program, dims=dims)  # type: ignore[arg-type]
        for n in (5, 1, 0, 7):
            x = torch.randn(n, 4)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), program(x))
        graphs[str(dims)] = tilewright.stats().graphs
    assert graphs["{'x': {0: 'n'}}"] <= 3
    assert graphs["oblivious"] == 1


def test_what_is_traced_for_size_zero_serves_no_other() -> None:
    """Torch loses the guard of a size that it takes for positive, and that the trace fixes at 0."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(x.shape[0], x.shape[0] + 1), torch.linspace(0, 1, x.shape[0])

    compiled = tilewright.compile(program, dims="oblivious")
    for n in (3, 4, 1, 0, 7, 0, 4):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), program(x))


def test_ranges_and_names_are_checked() -> None:
    compiled = tilewright.compile(lambda x, y: x + y, dims={"x": {0: ("n", 2, 8)}, "y": {0: "n"}})
    compiled(torch.ones(4), torch.ones(4))
    for a, b in ((9, 9), (4, 5)):
        with pytest.raises(InputError):
            compiled(torch.ones(a), torch.ones(b))
    with pytest.raises(InputError, match="did you mean"):
        tilewright.compile(lambda xs: xs, dims={"x": {0: "n"}})(torch.ones(3))
    with pytest.raises(InputError):
        tilewright.compile(lambda x: x, dims={"x": {0: 3}})  # type: ignore[dict-item]


def test_a_named_dim_that_the_program_fixes() -> None:
    def program(x: Tensor) -> Tensor:
        return x + torch.ones(7)

    with pytest.raises(InputError, match="fixed by the program"):
        tilewright.compile(program, dims={"x": {0: "n"}})(torch.ones(7))
    compiled = tilewright.compile(program, dims={"x": {0: "n"}})
    for _ in range(2):
        with pytest.raises(InputError, match="fixed by the program"):
            compiled(torch.ones(7))


@pytest.mark.parametrize("dims", [{"x": {0: "n"}}, "oblivious"])
def test_sizes_at_which_another_one_is_1_have_a_graph_of_their_own(dims: Any) -> None:
    """What has one element there broadcasts, or lies as torch fixes it; elsewhere the dim is free."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:5] + torch.ones(4, 3), x.unfold(0, 2, 1).sum(-1)

    compiled = tilewright.compile(program, (torch.randn(6, 3),), dims=dims)
    for n in (7, 2, 9, 2, 6):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), program(x))
    with pytest.raises(InputError, match="Size|size"):  # what does not fit is refused as before
        compiled(torch.randn(4, 3))


def test_a_length_that_torch_fixes_names_the_way_that_works(capfd: pytest.CaptureFixture[str]) -> None:
    layer = torch.nn.GRU(4, 4, batch_first=True)
    with pytest.raises(InputError, match="constant .100.. Hint: .*onnx.export") as told:
        tilewright.compile(layer, dims={"input": {1: "length"}})(torch.ones(1, 100, 4))
    assert (
        "mark_dynamic" not in str(told.value) and "Error while creating guard" not in capfd.readouterr().err
    )


def test_equal_example_sizes_of_different_names_stay_apart() -> None:
    compiled = tilewright.compile(lambda x, y: x.sum(0) + y.sum(0), dims={"x": {0: "n"}, "y": {0: "m"}})
    for n, m in ((4, 4), (5, 9), (9, 5)):
        x, y = torch.randn(n, 3), torch.randn(m, 3)
        torch.testing.assert_close(compiled(x, y), x.sum(0) + y.sum(0))
    assert tilewright.stats().graphs == 1


def test_sizes_that_come_from_data() -> None:
    def program(x: Tensor) -> Tensor:
        places = torch.nonzero(x > 0).flatten()
        return (x[places] * 2 + places).relu()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = tilewright.compile(program)
        for n in (5, 5, 5):
            x = torch.randn(n)
            torch.testing.assert_close(compiled(x), program(x))
    assert tilewright.stats().graphs == 1


def test_a_transformer_with_dynamic_batch_and_length() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    names = ("input_ids", "attention_mask")
    compiled = tilewright.compile(model, dims={n: {0: "batch", 1: "length"} for n in names})
    with torch.no_grad():
        for b, s in pairs(6):
            ids = torch.randint(0, 50, (b, s))
            mask = torch.ones(b, s, dtype=torch.long)
            mask[0, s // 2 :] = 0
            got = compiled(input_ids=ids, attention_mask=mask)
            wanted = model(input_ids=ids, attention_mask=mask)
            torch.testing.assert_close(got.last_hidden_state, wanted.last_hidden_state, atol=1e-5, rtol=1e-4)  # type: ignore[attr-defined]
            torch.testing.assert_close(got.pooler_output, wanted.pooler_output, atol=1e-5, rtol=1e-4)  # type: ignore[attr-defined]
    assert tilewright.stats().graphs == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tensor_read_forwards_and_backwards(dynamic: bool) -> None:
    """Two reductions that read one tensor, one of them flipped, share a kernel or not, but end and agree."""

    def distances(x: Tensor, y: Tensor) -> Tensor:
        near, far = (x - y).abs().sum(1), (x - y.flip(0)).abs().sum(1)
        return torch.relu(near - far.flip(0) + 1)

    def margin(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.triplet_margin_loss(x, y, y.flip(0), reduction="none")

    x, y = torch.randn(16, 12), torch.randn(16, 12)
    for program in (distances, margin):
        compiled = tilewright.compile(
            program, (x, y), dims={"x": {0: "n"}, "y": {0: "n"}} if dynamic else None
        )
        torch.testing.assert_close(compiled(x, y), program(x, y))


def test_arguments_that_cannot_be_compared() -> None:
    """Objects that hold tensors are equal where these are, element by element: a question without an answer."""

    @dataclass
    class Held:
        x: torch.Tensor

    double = tilewright.compile(lambda held: held.x * 2)
    for rows in (3, 3, 4):
        assert torch.equal(double(Held(torch.ones(rows, 4))), torch.full((rows, 4), 2.0))


@pytest.mark.parametrize("program", [torch.max, torch.min, lambda x: x.max(0), lambda x: x.min(0).values])
def test_no_elements_have_no_extremum(program: Callable[..., object]) -> None:
    x = torch.ones(0, 5)
    with pytest.raises((RuntimeError, IndexError), match="Expected reduction dim"):
        tilewright.compile(lambda a: program(a))(x)


@pytest.mark.parametrize("dims", [{"x": "n"}, {"x": ["n"]}, {"x": {0: ("n", 9, 3)}}])
def test_dims_that_say_nothing(dims: Any) -> None:
    with pytest.raises(InputError, match="dim"):
        tilewright.compile(lambda x: x + 1, dims=dims)
