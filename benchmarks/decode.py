"""`python -m benchmarks.decode --json FILE`: token after token from a static cache, as users of transformers have it,
or, with `--growing`, from one that grows, so that each token has sizes that nobody has seen before.

Random weights of published shapes. Each contestant has a model call of its own over a cache of its own, all start from
the same prompt and take turns; of each: milliseconds per token (median, least), bytes that a token must read (weights
and the used part of the cache) beside what it reads at that rate, and whether its greedy tokens are eager's. On a GPU,
contestants replay CUDA graphs where they can. With `--first`, also how long each takes to read a prompt in one call. On
a CPU, the time of all cores is told too, which other programs of the machine disturb less, and in each turn as many
bytes are read and summed up: no token can take less.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import tilewright
from benchmarks import record

SHAPES: Mapping[str, Mapping[str, int]] = {
    "llama-tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "vocab_size": 128},
    "llama-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                   "num_key_value_heads": 3, "vocab_size": 49152},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Sizes as their publishers give them; llama-135m is SmolLM's, llama-1b that of Llama 3.2. Of the tiny one a token is
little more than its calls."""

PEERS = ("eager", "inductor", "tilewright")
GPU_PEERS = ("eager", "eager graph", "inductor", "reduce-overhead", "max-autotune", "tilewright")
WARM = 3
"""Tokens before the clock: a graph is captured at the second call."""
FIRST_ROUNDS = 8
"""Prompts that each contestant reads, the first of them before the clock."""


@dataclass
class Contestant:
    """A way to call the model, with its cache, the token it is at, and what it took."""

    name: str
    call: Callable[..., object]
    cache: Cache
    token: Tensor
    place: int
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)

    def timed(self, model: LlamaForCausalLM) -> None:
        """Make the next token by the clock: the token is read, so that the device is done."""
        start, cores = time.perf_counter(), time.process_time()
        self.step(model)
        self.seconds.append(time.perf_counter() - start)
        self.core_seconds.append(time.process_time() - cores)

    def begin(self, model: LlamaForCausalLM, prompt: Tensor, growing: bool) -> None:
        """Read a prompt [batch, length] as eager does, into an empty cache: the first token is made of it."""
        if growing:
            self.cache = DynamicCache(config=model.config)
        elif self.place:
            self.cache.reset()
        length = prompt.shape[1]
        places = torch.arange(length, device=prompt.device)
        more = {"cache_position": places} if "cache_position" in _parameters(model) else {}
        first = model(input_ids=prompt, past_key_values=self.cache, logits_to_keep=1, **more).logits
        self.token, self.place = first[:, -1:].argmax(-1), length
        self.tokens, self.seconds, self.core_seconds = [], [], []

    def first(self, model: LlamaForCausalLM, prompt: Tensor) -> float:
        """Seconds from a prompt [batch, length] to its first token, into an empty static cache."""
        self.cache.reset()
        places = torch.arange(prompt.shape[1], device=prompt.device)[None]
        more = {"cache_position": places[0]} if "cache_position" in _parameters(model) else {}
        torch.cuda.synchronize() if prompt.is_cuda else None
        start = time.perf_counter()
        made = self.call(
            input_ids=prompt, position_ids=places, past_key_values=self.cache, logits_to_keep=1, **more
        )
        logits = made.logits if hasattr(made, "logits") else made  # type: ignore[attr-defined]
        int(logits[0, -1].argmax())
        return time.perf_counter() - start

    def step(self, model: LlamaForCausalLM) -> None:
        """Make the next token of each row and write it down."""
        where = torch.full((1, 1), self.place, device=self.token.device)
        more = {"cache_position": where[0]} if "cache_position" in _parameters(model) else {}
        made = self.call(input_ids=self.token, position_ids=where, past_key_values=self.cache, **more)
        logits = made.logits if hasattr(made, "logits") else made  # type: ignore[attr-defined]
        self.token = logits[:, -1:].argmax(-1)
        self.tokens.append(int(self.token[0, 0]))
        self.place += 1


class GraphOfEager:
    """Calls a model as eager does, by a CUDA graph from the second token on. Prompts are read without one."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.call = model.forward
        self.captured: tuple[torch.cuda.CUDAGraph, dict[str, Tensor], object] | None = None

    def __call__(self, **given: Any) -> object:
        tokens = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if tokens["input_ids"].shape[1] > 1:
            return self.call(**given)
        if self.captured is None:
            kept = {name: x.clone() for name, x in tokens.items()}
            # What is captured does not run: libraries are started and this token is made without a graph.
            made = self.call(**given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self.call(**(given | kept))
            self.captured = graph, kept, result
            return made
        graph, kept, result = self.captured
        for name, x in tokens.items():
            kept[name].copy_(x)
        graph.replay()
        return result


def _parameters(model: LlamaForCausalLM) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(model).forward).parameters


def built(name: str, model: LlamaForCausalLM, growing: bool) -> Callable[..., object]:
    """The call of a contestant, for a cache that grows or stays."""
    on_gpu = model.device.type == "cuda"
    if name == "eager":
        return model.forward
    if name == "eager graph":
        return GraphOfEager(model)
    if name == "tilewright":
        options = {"cuda_graphs": on_gpu and not growing}
        return torch.compile(model.forward, backend=tilewright.backend, dynamic=growing, options=options)
    if name == "inductor":
        return torch.compile(model.forward, dynamic=growing)
    return torch.compile(model.forward, mode=name, dynamic=growing)


def least_bytes(model: LlamaForCausalLM, batch: int, context: int) -> int:
    """Bytes of the weights that a token needs (one line of the embedding), and of the used part of the cache."""
    c, size = model.config, model.dtype.itemsize
    weights = sum(p.numel() for p in model.parameters()) - c.vocab_size * c.hidden_size
    if c.tie_word_embeddings:
        weights += c.vocab_size * c.hidden_size
    depth = c.hidden_size // c.num_attention_heads
    cache = 2 * c.num_hidden_layers * c.num_key_value_heads * depth * context * batch
    return (weights + cache) * size


@dataclass
class Reader:
    """Sums up as many bytes as a token must read: the least time of a token on a CPU."""

    values: Tensor
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)

    def timed(self) -> None:
        """Read all once."""
        start, cores = time.perf_counter(), time.process_time()
        self.values.sum()
        self.seconds.append(time.perf_counter() - start)
        self.core_seconds.append(time.process_time() - cores)


def decoded(arguments: argparse.Namespace, batch: int) -> Iterator[record.Facts]:
    """The facts of one batch at each length of context. Contestants are built once: lengths are data."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[arguments.shape], max_position_embeddings=arguments.cache)
    with device:  # weights of large shapes take minutes to draw elsewhere
        model = LlamaForCausalLM(config).to(dtype).eval()
    prompts = [
        torch.randint(0, config.vocab_size, (batch, context), device=device) for context in arguments.context
    ]
    built: record.Facts = {}
    contestants, failed = started(arguments, model, prompts[0], built)
    for prompt in prompts:
        least = least_bytes(model, batch, prompt.shape[1])
        facts: record.Facts = {"batch": batch, "context": prompt.shape[1], "least_bytes": least, **built}
        reader = Reader(torch.ones(least // 4)) if device.type == "cpu" else None
        load = [os.getloadavg()[0]]
        timed(arguments, model, prompt, contestants, reader)
        facts["load"] = [round(x, 1) for x in (*load, os.getloadavg()[0])]
        told = next(c for c in contestants if c.name == "eager")
        for made in contestants:
            facts[made.name] = told_of(made, told, least, batch)
        facts |= compared(contestants, reader)
        yield facts | ({"failed": failed} if failed else {})
    if arguments.first:
        prompt = torch.randint(0, config.vocab_size, (batch, arguments.first), device=device)
        yield {"batch": batch, "prompt": arguments.first, **first_tokens(model, prompt, contestants)}


def timed(
    arguments: argparse.Namespace, model: LlamaForCausalLM, prompt: Tensor,
    contestants: Sequence[Contestant], reader: Reader | None,
) -> None:  # fmt: skip
    """All contestants make tokens behind a prompt, in turns."""
    for made in contestants:
        made.begin(model, prompt, arguments.growing)
        for _ in range(WARM):
            made.step(model)
    for turn in range(arguments.rounds):
        for made in contestants[:: 1 if turn % 2 else -1]:
            for _ in range(arguments.tokens):
                made.timed(model)
        if reader is not None:
            reader.timed()


def compared(contestants: Sequence[Contestant], reader: Reader | None) -> record.Facts:
    """Ours beside the others."""
    facts: record.Facts = {} if reader is None else {"reading_alone": times(reader)}
    peers = [statistics.median(c.seconds) for c in contestants if c.name != "tilewright"]
    ours = [statistics.median(c.seconds) for c in contestants if c.name == "tilewright"]
    if ours:
        facts["x_best_peer"] = round(min(peers) / ours[0], 3)
    cores = {c.name: statistics.median(c.core_seconds) for c in contestants}
    if reader is not None and "tilewright" in cores:
        mine = cores.pop("tilewright")
        facts["x_core_seconds"] = {name: round(x / mine, 3) for name, x in cores.items()}
    return facts


def started(
    arguments: argparse.Namespace, model: LlamaForCausalLM, prompt: Tensor, facts: record.Facts
) -> tuple[list[Contestant], dict[str, record.Json]]:
    """Contestants that have made their first tokens, and why others could not."""
    contestants: list[Contestant] = []
    failed: dict[str, record.Json] = {}
    for name in arguments.against:
        torch._dynamo.reset()
        cache = (
            DynamicCache(config=model.config)
            if arguments.growing
            else StaticCache(config=model.config, max_cache_len=arguments.cache)
        )
        made = Contestant(name, built(name, model, arguments.growing), cache, prompt[:, :1], 0)
        made.begin(model, prompt, arguments.growing)
        start = time.perf_counter()
        try:
            for _ in range(WARM):
                made.step(model)
        except Exception as error:  # noqa: BLE001  a peer's failure is a fact
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        facts[f"{name}_build_s"] = round(time.perf_counter() - start, 1)
        print(name, facts[f"{name}_build_s"], flush=True)
        contestants.append(made)
    return contestants, failed


def first_tokens(model: LlamaForCausalLM, prompt: Tensor, contestants: Sequence[Contestant]) -> record.Facts:
    """How long each takes from a prompt to its first token, the whole prompt in one call; in turns."""
    facts: record.Facts = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(FIRST_ROUNDS):
        for made in contestants:
            start = time.perf_counter()
            try:
                taken = made.first(model, prompt)
            except Exception as error:  # noqa: BLE001  a peer's failure is a fact
                facts[made.name] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            if turn >= WARM:
                seconds.setdefault(made.name, []).append(taken)
            elif turn == 0:
                facts[f"{made.name}_build_s"] = round(time.perf_counter() - start, 1)
                print(made.name, "first", facts[f"{made.name}_build_s"], flush=True)
    found = {name: statistics.median(x) for name, x in seconds.items()}
    facts |= {name: {"ms_to_first_token": round(x * 1e3, 3)} for name, x in found.items()}
    ours = found.pop("tilewright", None)
    return facts | ({"x_best_peer": round(min(found.values()) / ours, 3)} if ours and found else {})


def times(timed: Contestant | Reader) -> dict[str, record.Json]:
    """What a token took, in milliseconds."""
    return {
        "ms_per_token": round(statistics.median(timed.seconds) * 1e3, 3),
        "least_ms": round(min(timed.seconds) * 1e3, 3),
        "core_ms": round(statistics.median(timed.core_seconds) * 1e3, 3),
    }


def told_of(made: Contestant, eager: Contestant, least: int, batch: int) -> dict[str, record.Json]:
    """The figures of a contestant."""
    seconds = statistics.median(made.seconds)
    pairs = enumerate(zip(made.tokens, eager.tokens, strict=True))
    return {
        **times(made),
        "tokens_per_s": round(batch / seconds, 1),
        "GB_per_s": round(least / seconds / 1e9, 1),
        "same_tokens": made.tokens == eager.tokens,
        "same_until": next((k for k, (a, b) in pairs if a != b), len(eager.tokens)),
    }


def main() -> None:
    """Run the batches and contexts, and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[256])
    parser.add_argument("--cache", type=int, default=1024, help="lines of the static cache")
    parser.add_argument("--first", type=int, default=0, help="length of a prompt that each reads in one call")
    parser.add_argument("--growing", action="store_true", help="a cache that grows by a line a token")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", nargs="+")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.first and arguments.growing:
        parser.error("--first reads a prompt into a static cache, and --growing has none")
    arguments.against = arguments.against or list(GPU_PEERS if arguments.device != "cpu" else PEERS)
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    facts: record.Facts = record.provenance(arguments.threads) | {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "growing": arguments.growing,
        "cache": arguments.cache,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
    }
    results: list[record.Json] = []
    with torch.inference_mode(False), torch.no_grad():
        for batch in arguments.batch:
            for found in decoded(arguments, batch):
                results.append(found)
                print(found, flush=True)
                if arguments.json is not None:
                    record.write_json(arguments.json, facts | {"results": results})


if __name__ == "__main__":
    main()
