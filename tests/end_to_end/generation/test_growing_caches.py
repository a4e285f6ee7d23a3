"""`generate` over caches that grow, with a compiled model: eager's tokens, by graphs whose number knows no length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import tilewright

from .families import FAMILIES, made, prompt, written


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_all_lengths_beyond_the_second_are_one_graph() -> None:
    layers = [DynamicLayer() for _ in range(2)]

    def step(layer: DynamicLayer, new: torch.Tensor) -> torch.Tensor:
        return sum(layer.update(new, new * 2), torch.zeros(())).sum((1, 2, 3))

    steps = [torch.compile(step, backend="tilewright"), step]
    tilewright.reset()
    for new in torch.randn(7, 2, 2, 1, 8):
        torch.testing.assert_close(*[s(layer, new) for s, layer in zip(steps, layers, strict=True)])
    assert torch.equal(layers[0].keys, layers[1].keys) and layers[0].keys.shape[2] == 7
    assert tilewright.stats().graphs == 3


def compiled(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="tilewright")
    return model


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of transformers
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in {"qwen3", "mixtral"}])
def test_tokens_are_eager_s(name: str, rows: int) -> None:
    given, how = prompt(rows, 12), {"max_new_tokens": 40, "do_sample": False}
    wanted = made(name).generate(**given, **how)
    done = written(compiled(made(name)), given, {}, **how)
    assert torch.equal(done.tokens, wanted)
    assert done.graphs == 0  # a second run of the same lengths


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("guesses", [2, 7])
def test_guesses_from_the_prompt_are_checked(name: str, guesses: int) -> None:
    how = {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": guesses}
    given = prompt(1, 40)
    wanted = made(name).generate(**given, **how)
    assert torch.equal(compiled(made(name)).generate(**given, **how), wanted)


def test_guesses_of_another_model_are_checked() -> None:
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    given = prompt(1, 12)
    wanted = made("llama").generate(**given, **how)
    tokens = compiled(made("llama")).generate(**given, assistant_model=made("qwen3"), **how)
    assert torch.equal(tokens, wanted)
