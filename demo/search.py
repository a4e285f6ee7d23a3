"""Sentence search: a transformer's token states, averaged over the real tokens and scaled to length 1."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
Array = NDArray[np.float32]
Tokens = tuple[torch.Tensor, torch.Tensor]
Tokenise = Callable[[Sequence[str]], Tokens]


class Embedder(torch.nn.Module):
    """Token ids and mask, int64 [n, length], to embeddings [n, width] of length 1."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mean over the tokens that the mask keeps, then L2 normalisation."""
        states = self.encoder(input_ids=ids, attention_mask=mask, return_dict=False)[0]
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


@dataclass(frozen=True)
class Match:
    """A sentence and its cosine similarity to the query."""

    score: float
    sentence: str


def load(folder: Path) -> tuple[Embedder, Tokenise]:
    """The model in eval mode and its tokeniser, from files only (the hub is switched off)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)

    def tokenise(texts: Sequence[str]) -> Tokens:
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    return Embedder(encoder.eval().float()).eval(), tokenise


def read_lines(path: Path) -> tuple[str, ...]:
    """The non-empty lines of a text file."""
    return tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def best_matches(query: Array, corpus: Array, sentences: Sequence[str], count: int = 3) -> tuple[Match, ...]:
    """The `count` sentences nearest to a query [width] in a corpus [n, width] of unit vectors, best first."""
    scores = corpus @ query
    return tuple(Match(float(scores[i]), sentences[i]) for i in np.argsort(-scores, kind="stable")[:count])
