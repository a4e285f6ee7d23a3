"""A small language model that writes: its weights, its tokens, and how fast each contestant makes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from demo import gguf

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextStreamer,
)

FILE = "language/smollm2-135m-instruct.gguf"
QUESTION = "Why is the sky blue? Answer in a few sentences."
WARM = 3
"""Tokens that the clock leaves out: the prompt, the compilation, the first call of what was compiled."""

PLACES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names of a layer's tensors in the file, and in the model."""


@dataclass(frozen=True)
class Writer:
    """A model and its tokens; `note` says what its weights are."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast | None
    note: str

    def asked(self, question: str) -> torch.Tensor:
        """The tokens of a question, as the model was taught to be asked."""
        if self.tokenizer is None:
            return torch.tensor([[ord(letter) % self.model.config.vocab_size for letter in question]])
        said = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer(said, return_tensors="pt")["input_ids"]  # pyright: ignore[reportReturnType]


@dataclass
class Clock:
    """A streamer that knows when each token came, and hands it on to one that prints."""

    onwards: TextStreamer | None = None
    moments: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, and with each token."""
        self.moments.append(time.perf_counter())
        if self.onwards is not None:
            self.onwards.put(value)

    def end(self) -> None:
        """Called behind the last token."""
        if self.onwards is not None:
            self.onwards.end()

    def per_second(self) -> float:
        """Tokens a second, by the median of what a token took."""
        took = [b - a for a, b in zip(self.moments, self.moments[1:], strict=False)][WARM:]
        return 1 / median(took) if took else float("nan")


def real(file: Path) -> Writer:
    """The model of a GGUF file of the Llama kind. Raises gguf.FormatError."""
    held = gguf.read(file)
    config = _config(held)
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=_weights(held, config))
    return Writer(model.eval(), _tokens(held), f"{held.facts['general.name']}, weights of {file.name}")


def random(**sizes: int) -> Writer:
    """A model of the same kind that nobody taught."""
    known = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    more: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**{**known, **heads, **more, **sizes})
    return Writer(LlamaForCausalLM(config).eval(), None, "random weights: what it writes means nothing")


def _config(held: gguf.Gguf) -> LlamaConfig:
    def fact(name: str) -> Any:
        return held.facts[name]

    if fact("general.architecture") != "llama":
        raise gguf.FormatError(f"a model of the kind {fact('general.architecture')}; read are those of Llama")
    return LlamaConfig(
        hidden_size=fact("llama.embedding_length"),
        intermediate_size=fact("llama.feed_forward_length"),
        num_hidden_layers=fact("llama.block_count"),
        num_attention_heads=fact("llama.attention.head_count"),
        num_key_value_heads=fact("llama.attention.head_count_kv"),
        max_position_embeddings=fact("llama.context_length"),
        rms_norm_eps=fact("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("llama.rope.freq_base")},
        vocab_size=fact("llama.vocab_size"),
        bos_token_id=fact("tokenizer.ggml.bos_token_id"),
        eos_token_id=fact("tokenizer.ggml.eos_token_id"),
        pad_token_id=fact("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="output.weight" not in held.tensors,
    )


def _weights(held: gguf.Gguf, config: LlamaConfig) -> dict[str, torch.Tensor]:
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    found: dict[str, torch.Tensor] = {}
    for name, values in held.tensors.items():
        tensor = torch.from_numpy(values)
        parts = name.split(".")
        if parts[0] != "blk":
            found[f"{outside[parts[0]]}.weight"] = tensor
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(parts[2])
        if heads is not None:
            tensor = _halves(tensor, heads)
        found[f"model.layers.{parts[1]}.{PLACES[parts[2]]}.weight"] = tensor
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The file turns neighbours by rotary angles, the model the two halves of a head: its lines stand in that order."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokens(held: gguf.Gguf) -> PreTrainedTokenizerFast:
    words, merges, kinds = (
        held.facts[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")
    )
    assert isinstance(words, list) and isinstance(merges, list) and isinstance(kinds, list)
    pairs = [tuple(str(m).split(" ", 1)) for m in merges]
    made = Tokenizer(models.BPE(vocab={str(w): k for k, w in enumerate(words)}, merges=pairs))  # pyright: ignore[reportArgumentType]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = [str(w) for w, kind in zip(words, kinds, strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in special])
    known = {
        f"{n}_token": str(words[int(str(held.facts[f"tokenizer.ggml.{n}_token_id"]))]) for n in ("bos", "eos")
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **known)


def how(name: str) -> dict[str, Any]:
    """What `generate` is told for a contestant: eager has a cache that grows, compilers one of a fixed size."""
    if name == "eager":
        return {}
    config = CompileConfig(backend=name, mode="default")
    config._compile_all_devices = True  # transformers compiles on GPUs alone by itself
    return {"cache_implementation": "static", "compile_config": config}


def written(writer: Writer, name: str, question: str, tokens: int, clock: Clock) -> list[int]:
    """The tokens that a contestant makes of a question, greedily; `clock` is told of each."""
    ids = writer.asked(question)
    said = writer.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        streamer=clock, **how(name),
    )  # fmt: skip
    return said[0, ids.shape[1] :].tolist()


def printing(writer: Writer) -> TextStreamer | None:
    """What prints text while it is made; None where tokens are no text."""
    if writer.tokenizer is None:
        return None
    return TextStreamer(writer.tokenizer, skip_prompt=True, skip_special_tokens=True)


def compared(
    writer: Writer, names: Sequence[str], question: str, tokens: int, say: Callable[[str], None]
) -> dict[str, tuple[list[int], float]]:
    """Tokens of each contestant and how many it makes a second; the text of the first is printed while it is made."""
    made: dict[str, tuple[list[int], float]] = {}
    for name in names:
        torch._dynamo.reset()
        clock = Clock(printing(writer) if not made else None)
        try:
            ids = written(writer, name, question, tokens, clock)
        except Exception as error:  # a peer's failure is a fact
            if name == "tilewright":
                raise
            say(f"{name} cannot write: {type(error).__name__}")
            continue
        made[name] = ids, clock.per_second()
        say(f"{name:10s} {clock.per_second():6.1f} tokens/s")
    return made
