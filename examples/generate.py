"""Writes text with transformers' `generate`, compiled by Tilewright: words while they are made, tokens a second.

    python examples/generate.py [MODEL.gguf]

MODEL.gguf is a Llama in the types F32, Q8_0 and Q4_1. Without one, the model of the demo is taken if `make demo` has
fetched it, else a small one of random weights. Nothing of the model is changed: `generate` is told to keep its cache at
a fixed size and which compiler to use, and one graph makes all tokens behind the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import tilewright

sys.path.insert(0, str(Path(__file__).parents[1]))  # the demo stands beside this folder
from demo import language, weights


def main(
    path: str | None = None, against: Sequence[str] = ("eager",), tokens: int = 64
) -> tuple[bool, int, int]:
    """Write; gives whether all wrote the same, the tokens, and the graphs that Tilewright compiled for them."""
    file = Path(path) if path else weights.FOLDER / language.FILE
    writer = language.real(file) if file.is_file() else language.random()
    print(f"{writer.note}\n{language.QUESTION}\n")
    before = tilewright.stats().graphs
    names = ["tilewright", *against]
    made = language.compared(writer, names, language.QUESTION, tokens, print)
    graphs = tilewright.stats().graphs - before
    ours, _ = made["tilewright"]
    same = all(ids == ours for ids, _ in made.values())
    print(
        f"{len(ours)} tokens by {graphs} graph; {'the same tokens' if same else 'OTHER tokens'} as {', '.join(against)}"
    )
    return same, len(ours), graphs


if __name__ == "__main__":
    main(*sys.argv[1:2], against=("eager", "inductor"))
