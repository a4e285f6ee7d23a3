"""The demo's language model: its file, its tokens, its clock. Without weights, but for the last test."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from demo import gguf, language, weights


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said.encode())) + said.encode()


def fact(name: str, value: Any) -> bytes:
    match value:
        case str():
            return text(name) + struct.pack("<I", 8) + text(value)
        case float():
            return text(name) + struct.pack("<If", 6, value)
        case int():
            return text(name) + struct.pack("<II", 4, value)
        case [int(), *_]:
            return text(name) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        case _:
            return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def file_of(facts: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    head += b"".join(fact(name, value) for name, value in facts.items())
    body = b""
    for name, (shape, kind, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % gguf.ALIGNMENT)
    return head + bytes(-len(head) % gguf.ALIGNMENT) + body


def test_blocks_of_every_type(tmp_path: Path) -> None:
    plain = np.arange(6, dtype="<f4")
    small = np.arange(-16, 16, dtype=np.int8)
    nibbles = np.arange(
        16, dtype=np.uint8
    )  # element k in the low half of byte k, element 16 + k in the high one
    scale, least = np.float16(0.5), np.float16(-2)
    data = file_of(
        {"a": 3, "b": "word", "c": 0.5, "d": [1, 2], "e": ["x", "yz"]},
        {
            "plain": ((2, 3), 0, plain.tobytes()),
            "small": ((1, 32), 8, scale.tobytes() + small.tobytes()),
            "least": (
                (32,),
                3,
                scale.tobytes() + least.tobytes() + (nibbles | (15 - nibbles) << 4).tobytes(),
            ),
        },
    )
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    held = gguf.read(path)
    assert dict(held.facts) == {"a": 3, "b": "word", "c": 0.5, "d": [1, 2], "e": ["x", "yz"]}
    np.testing.assert_array_equal(held.tensors["plain"], plain.reshape(2, 3))
    np.testing.assert_array_equal(held.tensors["small"], small[None] * np.float32(0.5))
    wanted = np.concatenate([nibbles, 15 - nibbles]) * np.float32(0.5) - 2
    np.testing.assert_array_equal(held.tensors["least"], wanted)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"PK\3\4", "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "middle of a fact"),
        (file_of({}, {"w": ((32,), 2, bytes(18))}), "tensor w has type 2"),
        (file_of({}, {"w": ((32,), 0, bytes(64))}), "middle of tensor w"),
    ],
)
def test_what_is_no_such_file_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(gguf.FormatError, match=why):
        gguf.read(tmp_path / "x.gguf")


WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "\u0120"]


def facts_of(model: LlamaForCausalLM) -> dict[str, Any]:
    c, of = model.config, "tokenizer.ggml."
    return {
        "general.architecture": "llama", "general.name": "tiny",
        "llama.embedding_length": c.hidden_size, "llama.feed_forward_length": c.intermediate_size,
        "llama.block_count": c.num_hidden_layers, "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads, "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": c.vocab_size, of + "bos_token_id": 1, of + "eos_token_id": 2, of + "padding_token_id": 2,
        of + "tokens": WORDS, of + "merges": ["a b"], of + "token_type": [3, 3, 3, 1, 1, 1, 1],
    }  # fmt: skip


def tensors_of(model: LlamaForCausalLM) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """A model's weights as such files name and order them."""
    names = {v: k for k, v in language.PLACES.items()}
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found: dict[str, tuple[tuple[int, ...], int, bytes]] = {}
    for name, w in model.state_dict().items():
        place = name.removesuffix(".weight")
        if place in outside:
            found[f"{outside[place]}.weight"] = (tuple(w.shape), 0, w.numpy().tobytes())
            continue
        _, _, layer, inner = place.split(".", 3)
        if names[inner] in ("attn_q", "attn_k"):  # halves of a head become neighbours
            heads = w.shape[0] // (model.config.hidden_size // model.config.num_attention_heads)
            w = w.view(heads, 2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape)
        found[f"blk.{layer}.{names[inner]}.weight"] = (tuple(w.shape), 0, w.contiguous().numpy().tobytes())
    return found


def test_a_file_becomes_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    model = language.random(vocab_size=len(WORDS), num_hidden_layers=1).model
    path = tmp_path / "tiny.gguf"
    path.write_bytes(file_of(facts_of(model), tensors_of(model)))
    writer = language.real(path)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(writer.model(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert writer.tokenizer is not None and "tiny" in writer.note
    assert writer.tokenizer("ab b<|im_end|>")["input_ids"] == [5, 6, 4, 2]
    assert writer.asked("b")[0, 0] == 1


def test_the_clock_leaves_out_the_first_tokens() -> None:
    clock = language.Clock(moments=[0.0, 9.0, 10.0, 14.0, 14.5, 15.0])
    assert clock.per_second() == 2.0


@pytest.mark.skipif(
    bool(weights.missing(weights.LANGUAGE)),
    reason="the model files are not there yet: make demo downloads them",
)
def test_the_model_knows_what_is_blue() -> None:
    writer = language.real(weights.FOLDER / language.FILE)
    assert writer.tokenizer is not None
    said = language.written(writer, "eager", language.QUESTION, 24, language.Clock())
    assert "sunlight" in writer.tokenizer.decode(said)
