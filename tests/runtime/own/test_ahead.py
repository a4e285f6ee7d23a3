"""The library of our own routines is there when a trace is over, where a program will want it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.errors import BuildError
from tilewright.options import Options
from tilewright.runtime.own import ahead


def builds(
    monkeypatch: pytest.MonkeyPatch, weights: Sequence[Tensor], options: Options, fails: bool = False
) -> list[str]:
    """The threads that build for such weights."""
    found: list[str] = []

    def build(*_: object) -> Path:
        found.append(threading.current_thread().name)
        if fails:
            raise BuildError("no", phase="build")
        return Path()

    monkeypatch.setattr(ahead, "build_texts", build)
    with ahead.built_ahead(weights, options):
        pass
    return found


def test_it_is_built_beside_for_weights_of_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    kept = Options(cache_dir=str(tmp_path))
    weight = torch.ones(64, 64)
    assert builds(monkeypatch, [torch.ones(3), weight], kept) == ["tilewright-own"]
    assert builds(monkeypatch, [weight], kept, fails=True) == ["tilewright-own"]  # told where it is wanted
    for others in ([], [torch.ones(4096)], [torch.ones(8, 8)], [weight.long()], [weight.to("meta")]):
        assert not builds(monkeypatch, others, kept)
    assert not builds(monkeypatch, [weight], Options(cache=False))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert not builds(monkeypatch, [weight], kept)


def test_what_a_trace_raises_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ahead, "build_texts", lambda *_: None)
    with pytest.raises(KeyError), ahead.built_ahead([torch.ones(64, 64)], Options(cache_dir=str(tmp_path))):
        raise KeyError("refused")
    assert not any(t.name == "tilewright-own" for t in threading.enumerate())
