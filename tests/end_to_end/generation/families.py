"""Small language models of the kinds that transformers knows, with random weights, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CompileConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import tilewright

WORDS: dict[str, Any] = {"vocab_size": 300, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = WORDS | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
"""Weights so large that the best token is far from the next one, and that few tokens come twice."""
WINDOW: dict[str, Any] = SIZES | {"sliding_window": 32}
GEMMA = WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16}
EXPERTS = SIZES | {"num_experts_per_tok": 2}
SMALL_STATES = WORDS | {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.3}
T5_SIZES = WORDS | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
GPT2_SIZES = WORDS | {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}

FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"])
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=32)
    ),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES, decoder_start_token_id=0)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL_STATES)),
}

SLIDING = frozenset({"mistral", "gemma2", "gemma3"})
"""Families whose caches keep the length as a number of Python, which their code asks whether the window is full."""


def made(name: str) -> Any:
    """A model of a family."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    if name == "t5":  # its own numbers make one token again and again
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = None
    return model


def prompt(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens; of several rows the first ones are padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (rows, length))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :7] = 0
        mask[1, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def static(**more: Any) -> dict[str, Any]:
    """What `generate` is told, for a cache of a fixed size."""
    compiling = CompileConfig(backend="tilewright", **more)
    compiling._compile_all_devices = True  # transformers compiles on GPUs alone by itself
    return {"cache_implementation": "static", "compile_config": compiling}


@dataclass(frozen=True)
class Written:
    """Tokens of eager and of ours, and the graphs that these took."""

    wanted: torch.Tensor
    tokens: torch.Tensor
    graphs: int


def written(
    model: Any, given: Mapping[str, torch.Tensor], compiled: Mapping[str, Any], **how: Any
) -> Written:
    """Two runs of ours beside eager's; both make the same tokens, and the second one compiles nothing."""
    torch.manual_seed(5)
    wanted = model.generate(**given, **how)
    graphs = [tilewright.stats().graphs]
    runs: list[torch.Tensor] = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(model.generate(**given, **how, **compiled))
        graphs.append(tilewright.stats().graphs)
    assert torch.equal(*runs) and graphs[2] == graphs[1]
    return Written(wanted, runs[0], graphs[1] - graphs[0])
