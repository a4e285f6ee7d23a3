"""`generate` of every family over a cache of a fixed size: eager's tokens, by few graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewright

from .families import FAMILIES, SLIDING, made, prompt, static, written


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_two_hundred_tokens_are_eager_s(name: str) -> None:
    given = prompt(1, 12)
    done = written(made(name), given, static(), max_new_tokens=200, do_sample=False)
    assert torch.equal(done.tokens, done.wanted)
    assert len(set(done.tokens[0].tolist())) > 5 or name == "t5"
    assert done.graphs <= (3 if name in SLIDING else 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_several_lengths(name: str) -> None:
    done = written(made(name), prompt(3, 12), static(), max_new_tokens=40, do_sample=False)
    assert torch.equal(done.tokens, done.wanted)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(("rows", "length", "graphs"), [(1, 48, 3), (3, 40, 4)])
def test_a_prompt_in_chunks(name: str, rows: int, length: int, graphs: int) -> None:
    """transformers gives the first chunk no mask, and one to the others: a graph each, one for a shorter last chunk and
    for all other lengths, and one for single tokens."""
    chunks: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "prefill_chunk_size": 16}
    done = written(made(name), prompt(rows, length), static(), **chunks)
    assert torch.equal(done.tokens, done.wanted)
    assert done.graphs <= graphs + (name in SLIDING)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba"])
def test_the_same_draws_give_the_same_tokens(name: str) -> None:
    draws: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    done = written(made(name), prompt(2, 12), static(), max_new_tokens=40, **draws)
    assert torch.equal(done.tokens, done.wanted)


def test_longer_prompts_take_the_graph_of_shorter_ones() -> None:
    model = made("llama")
    tilewright.reset()
    for length in (5, 9, 30):
        given = prompt(1, length)
        wanted = model.generate(**given, max_length=64, do_sample=False)
        assert torch.equal(model.generate(**given, max_length=64, do_sample=False, **static()), wanted)
    assert tilewright.stats().graphs == 1
