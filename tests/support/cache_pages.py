"""`python -m tests.support.cache_pages SHIFT`: tokens that are decoded by what is compiled, over caches whose lines lie
in pages of their own. Only those that a token makes may be written (or, `SHIFT` further on, others): a store elsewhere
ends the process. Prints a sum of each token's logits."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

LAYERS, HEADS, LENGTH, PROMPT, TOKENS = 3, 2, 12, 4, 4
DEPTH = mmap.PAGESIZE // 4
"""Singles in a line of one head: a page."""
READ, WRITE = 1, 2


class CachePages:
    """Memory of a cache of one layer [1, heads, length, depth], whose lines are protected one by one."""

    def __init__(self, values: Tensor) -> None:
        self.memory = mmap.mmap(-1, values.nbytes)
        self.tensor = torch.frombuffer(self.memory, dtype=values.dtype).view(values.shape)
        self.tensor.copy_(values)

    def allow(self, place: int | None) -> None:
        """Let only the line at one place be written; None: all of them."""
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for line in range(self.tensor[..., 0].numel()):
            may = place is None or line % LENGTH == place
            at = ctypes.c_void_p(self.tensor.data_ptr() + line * mmap.PAGESIZE)
            assert protect(at, ctypes.c_size_t(mmap.PAGESIZE), READ | (WRITE if may else 0)) == 0


def model_and_prompt() -> tuple[LlamaForCausalLM, Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=DEPTH, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), torch.randint(0, 64, (1, PROMPT))


def decoded(backend: str, shift: int = 0) -> list[Tensor]:
    """Logits of some tokens, all but the first two behind protected lines; `shift` protects those that are written."""
    model, token = model_and_prompt()
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    model(input_ids=token, position_ids=torch.arange(PROMPT)[None], past_key_values=cache)
    pages: list[CachePages] = []
    for layer in cache.layers:
        for name in ("keys", "values"):
            pages.append(CachePages(getattr(layer, name)))
            setattr(layer, name, pages[-1].tensor)
    call: Any = torch.compile(model.forward, backend=backend, dynamic=False)
    found: list[Tensor] = []
    for n in range(TOKENS):
        place = PROMPT + n
        for p in pages:
            p.allow(place + shift if n > 1 else None)
        where = torch.full((1, 1), place)
        found.append(call(input_ids=token[:, :1], position_ids=where, past_key_values=cache).logits)
    for p in pages:
        p.allow(None)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        made = decoded("tilewright", int(sys.argv[1]))
    print(*(float(x.double().square().sum()) for x in made))
