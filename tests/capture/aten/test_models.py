"""Whole models: nothing is left to a library by need, one graph serves every batch, and the graph means the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.ops.captured_op import library_calls, same
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.interp import run_graph
from tilewright.ir.graph import Graph

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
}


def _model(name: str, **config: object) -> torch.nn.Module:
    settings = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}Model")(settings).eval()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Bert": lambda: _model("Bert", **TEXT),
    "Llama": lambda: _model("Llama", **TEXT, num_key_value_heads=2, use_cache=False),
    "ResNet": lambda: _model("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "ConvNext": lambda: _model("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "MobileNetV2": lambda: _model("MobileNetV2", depth_multiplier=0.35),
    "Swin": lambda: _model(
        "Swin", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    ),
}


def _inputs(name: str, batch: int) -> dict[str, torch.Tensor]:
    if name in ("Bert", "Llama"):
        ids = torch.randint(0, 50, (batch, 9))
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(9) < 7).long().expand(batch, 9).contiguous(),
        }
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def _captured(name: str, dynamic: bool) -> tuple[Graph, torch.export.ExportedProgram, torch.nn.Module]:
    model, given = MODELS[name](), _inputs(name, 2)
    sizes = {k: {0: torch.export.Dim("batch", min=2, max=64)} for k in given} if dynamic else None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (), given, dynamic_shapes=sizes, strict=False)
        exported = exported.run_decompositions(decompositions())
    return from_fx(exported.graph_module), exported, model


@pytest.mark.parametrize("name", ["Bert", "Swin"])
def test_static(name: str) -> None:
    graph, _, _ = _captured(name, dynamic=False)
    assert library_calls(graph) == []


@pytest.mark.parametrize("name", MODELS)
def test_any_batch(name: str) -> None:
    graph, exported, model = _captured(name, dynamic=True)
    assert library_calls(graph) == []
    if name == "MobileNetV2":
        return  # the same ops as the residual network, at ten times the interpreter's work
    weights = {**exported.state_dict, **exported.constants}
    given = _inputs(name, 3)
    waiting = list(given.values())
    arguments = [
        waiting.pop(0) if s.kind is InputKind.USER_INPUT else weights[s.target or ""].detach()
        for s in exported.graph_signature.input_specs
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = [t for t in tree_leaves(model(**given)) if isinstance(t, torch.Tensor)]
    for ours, theirs in zip(run_graph(graph, arguments), want, strict=True):
        same(np.asarray(ours), theirs)
