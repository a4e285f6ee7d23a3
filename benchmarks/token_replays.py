"""`python -m benchmarks.token_replays --json FILE`: what one token of a language model takes the device, in captured
graphs without a host between, with single decisions of the compiler left out.

Each variant compiles the same model with a static cache anew and captures a token; replays take turns. Of each:
microseconds a token (median, least), kernels, and how far its logits are from those of the first one. Random
weights of published shapes (`benchmarks.decode`).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import tilewright
from benchmarks import record
from benchmarks.decode import SHAPES, least_bytes
from benchmarks.early_launch import steps
from benchmarks.record import Facts, Json
from tilewright.lower.legalise import early_launch
from tilewright.pipeline import phases

Replay = Callable[[], object]
ROUNDS, REPLAYS = 15, 30


@contextmanager
def without_fronts() -> Generator[None]:
    """No kernel takes in what is in front of it."""
    with mock.patch.object(phases, "join_fronts", lambda cover, *_: cover):  # pyright: ignore[reportUnknownLambdaType]
        yield


@contextmanager
def without_early_release() -> Generator[None]:
    """Every kernel releases the one behind after its last load."""
    with mock.patch.object(
        early_launch, "GPU_BLOCKS", replace(early_launch.GPU_BLOCKS, max_early_release_bytes=0)
    ):
        yield


@contextmanager
def without_both() -> Generator[None]:
    """Neither."""
    with without_fronts(), without_early_release():
        yield


VARIANTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "as it is": nullcontext,
        "without fronts": without_fronts,
        "without early release": without_early_release,
        "without both": without_both,
    }
)


def captured(
    model: LlamaForCausalLM, arguments: argparse.Namespace, keep: list[object]
) -> tuple[Replay, Tensor]:
    """A replay of one token, and its logits; what it needs is kept."""
    config, context = model.config, arguments.context
    torch.manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (arguments.batch, context), device="cuda")
    cache = StaticCache(config=config, max_cache_len=arguments.cache)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    space: dict[str, Any] = {}
    exec(
        "def forward(model, **given):\n    return model(**given).logits", space
    )  # code of its own for Dynamo
    compiled = torch.compile(space["forward"], backend=tilewright.backend, dynamic=False)
    token, where = prompt[:, :1], torch.full((arguments.batch, 1), context, device="cuda")

    def step() -> Tensor:
        return compiled(model, input_ids=token, position_ids=where, past_key_values=cache)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()
    graph.replay()
    torch.cuda.synchronize()
    keep += [compiled, cache, graph, token, where]
    return graph.replay, logits


def timed(arguments: argparse.Namespace) -> Facts:
    """The facts of all variants."""
    with torch.device("cuda"):
        config = LlamaConfig(**SHAPES[arguments.shape], max_position_embeddings=arguments.cache)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    found: dict[str, dict[str, Json]] = {}
    replays: dict[str, Replay] = {}
    logits: dict[str, Tensor] = {}
    keep: list[object] = []
    for name in arguments.variants:
        begin = time.perf_counter()
        with VARIANTS[name]():
            replays[name], logits[name] = captured(model, arguments, keep)
        found[name] = {"build_s": round(time.perf_counter() - begin, 1), **steps()}
        print(name, found[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(ROUNDS):
        for name in list(replays)[:: 1 if turn % 2 else -1]:
            times[name].append(replay_us(replays[name]))
    first = logits[arguments.variants[0]].float()
    for name, us in times.items():
        found[name] |= {
            "us": round(statistics.median(us), 1),
            "least_us": round(min(us), 1),
            "largest_difference": float((logits[name].float() - first).abs().max()),
        }
    return {
        "batch": arguments.batch,
        "context": arguments.context,
        "least_bytes": least_bytes(model, arguments.batch, arguments.context),
        "largest_logit": float(first.abs().max()),
        "variants": found,
    }


def replay_us(replay: Replay) -> float:
    """Microseconds of a replay among others."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1e3


def main() -> None:
    """Time the variants, and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cache", type=int, default=1024, help="lines of the static cache")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        facts = record.provenance(1) | {"shape": arguments.shape, "device": torch.cuda.get_device_name()}
        facts |= timed(arguments)
    print(facts, flush=True)
    if arguments.json is not None:
        record.write_json(arguments.json, facts)


if __name__ == "__main__":
    main()
