"""transformers' `generate` over a static cache, unchanged but for its `compile_config`: eager's tokens, and nothing of
a cache is copied: a token writes one line of each layer's keys and values."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.support import cache_pages
from tests.support.layers import ROOT
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import StaticLayer

import tilewright

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


def test_lines_of_a_cache_are_stored_where_it_lies() -> None:
    layers = [StaticLayer(max_cache_len=16) for _ in range(2)]
    keys = torch.randn(4, 1, 2, 1, 8)

    def step(layer: StaticLayer, new: torch.Tensor) -> torch.Tensor:
        return sum(layer.update(new, new * 2), torch.zeros(())).sum((1, 3))

    steps = [torch.compile(step, backend="tilewright", dynamic=False), step]
    for new in keys:
        made = [s(layer, new) for s, layer in zip(steps, layers, strict=True)]
        torch.testing.assert_close(*made)
    torch.testing.assert_close(layers[0].keys, layers[1].keys)
    assert tilewright.stats().writes_copied == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
def test_tokens_are_eager_s_and_caches_are_written_in_place(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    prompt = torch.randint(3, 300, (3 if padded else 1, 12))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :7] = 0
        mask[1, :2] = 0
    how: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": mask,
    }
    wanted = model.generate(prompt, **how)
    compiling = CompileConfig(backend="tilewright")
    compiling._compile_all_devices = True  # transformers compiles on GPUs alone by itself
    before = tilewright.stats()
    for _ in range(2):
        made = model.generate(prompt, cache_implementation="static", compile_config=compiling, **how)
        assert torch.equal(made, wanted)
    after = tilewright.stats()
    assert after.graphs > before.graphs
    assert after.writes_in_place - before.writes_in_place >= 3 * 2
    assert after.writes_copied == before.writes_copied


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", cache_pages.__name__, *arguments],
        cwd=ROOT.parents[1],
        capture_output=True,
        text=True,
    )


def test_a_token_writes_one_line_of_each_layer() -> None:
    with torch.no_grad():
        wanted = cache_pages.decoded("eager")
    done = child("0")
    assert done.returncode == 0, done.stderr
    sums = [float(x) for x in done.stdout.split()[-cache_pages.TOKENS :]]
    assert sums == pytest.approx([float(x.double().square().sum()) for x in wanted], rel=1e-5)


def test_a_store_elsewhere_ends_the_process() -> None:
    """The pages are protected indeed."""
    assert child("1").returncode == -signal.SIGSEGV
