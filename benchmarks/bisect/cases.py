"""The defects that are planted: kernels, calls, rewrites and capture, forward and backward, frozen or not."""

from __future__ import annotations

from benchmarks.bisect.models import MODELS
from benchmarks.bisect.planting import RULES, TEXTS, Bug

WANTED = 50


def _all() -> list[Bug]:
    bugs: list[Bug] = []
    for way in TEXTS:
        for n, model in enumerate(MODELS):
            bugs.append(Bug(model, "kernel", way, place=n % 2))
            bugs += [Bug(model, "kernel", way, graph, training=True) for graph in (0, 1)]
    for model in ("dense", "convolved", "attending"):
        for way in ("scaled", "strided"):
            bugs.append(Bug(model, "call", way))
            bugs.append(Bug(model, "call", way, 1, 1, training=True))
        bugs.append(Bug(model, "offset", "operand", place=1))
        bugs.append(Bug(model, "offset", "operand", 1, 1, training=True))
        bugs.append(Bug(model, "capture", "call", place=1))
        bugs.append(Bug(model, "capture", "call", 1, 2, training=True))
    bugs += [Bug("convolved", "call", way, freeze=True) for way in ("scaled", "strided")]
    for model in MODELS:
        bugs.append(Bug(model, "declaration", "op", place=1))
        bugs.append(Bug(model, "declaration", "op", 1, 2, training=True))
        bugs.append(Bug(model, "rewrite", "normalise", place=1))
        bugs.append(Bug(model, "rewrite", "normalise", 1, 1, training=True))
        bugs.append(Bug(model, "rewrite", "split", 1, training=True))
    models = {"exp": "folded", "tanh": "folded", "div": "dense", "sub": "dense", "rsqrt": "dense"}
    bugs += [Bug(models.get(name, "folded"), "rule", name) for name in RULES]
    bugs += [Bug("dense", "rule", name, training=True) for name in ("div", "mul", "sub")]
    return bugs


BUGS = tuple(_all())
"""More than are wanted: some places can be wrong without a result that is."""
