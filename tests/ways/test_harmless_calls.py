"""Programs of files whose graphs would reach memory that is not theirs: none of them runs, and honest ones do."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import export

import tilewright
from tilewright.capture.harmless.ops import unknown_calls, unknown_calls_given, without_found_memory
from tilewright.errors import ModelError
from tilewright.ways.program_loader import captured_program, check_as_given

aten = torch.ops.aten


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: object) -> object:
        return self.function(*given)


def graph_of(*targets: object) -> fx.GraphModule:
    """A graph that calls these of its input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        graph.call_function(target, (x,))  # pyright: ignore[reportArgumentType]
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


UNSAFE = (
    aten.set_.source_Tensor, aten.resize_.default, aten.resize.default, aten.max_pool2d_with_indices_backward.default,
    aten.mkldnn_rnn_layer.default, aten.segment_reduce.default, aten._reshape_alias.default,
    aten.linalg_lu_solve.default, aten._ctc_loss.default,
    torch.ops.higher_order.print, torch.ops.higher_order.triton_kernel_wrapper_mutation,
)  # fmt: skip


@pytest.mark.parametrize("target", UNSAFE, ids=str)
def test_calls_that_may_reach_other_memory_are_told(target: object) -> None:
    gm = graph_of(torch.ops.aten.relu.default, target)
    assert list(unknown_calls(gm)) == list(unknown_calls_given(gm)) == [str(target)]


def test_writes_and_composites_stand_in_graphs_as_given() -> None:
    gm = graph_of(aten.add_.Tensor, aten.lstm.input, aten.batch_norm.default)
    assert not list(unknown_calls_given(gm)) and len(list(unknown_calls(gm))) == 3


def test_ops_handed_to_others_and_in_bodies_are_looked_at() -> None:
    body = graph_of(aten.set_.source_Tensor)
    outer = graph_of(aten.relu.default)
    outer.add_module("body", body)
    assert list(unknown_calls(outer)) == ["aten.set_.source_Tensor"]
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.higher_order.with_effects, (None, aten.resize_.default)))
    assert list(unknown_calls(fx.GraphModule(nn.Module(), graph))) == ["aten.resize_.default"]


def test_memory_as_found_becomes_zeros() -> None:
    graph = fx.Graph()
    made = graph.call_function(aten.empty.memory_format, ([4096],))
    graph.output(graph.call_function(aten.add.Tensor, (made, 1)))
    gm = fx.GraphModule(nn.Module(), graph)
    without_found_memory(gm)
    assert torch.equal(gm(), torch.ones(4096))


def _unpooled(x: Tensor, at: Tensor) -> Tensor:
    return aten.max_pool2d_with_indices_backward(
        x, torch.zeros(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, at
    )


def test_a_program_that_scatters_unchecked_is_refused(tmp_path: Path) -> None:
    at = torch.full((1, 1, 2, 2), 1 << 40)
    path = tmp_path / "m.pt2"
    torch.export.save(export(Program(_unpooled), (torch.ones(1, 1, 2, 2), at)), path)
    with pytest.raises(ModelError, match="memory that is not its own"):
        tilewright.compile(path)


def test_bags_end_where_they_begin_at_least(tmp_path: Path) -> None:
    bags, offsets = nn.EmbeddingBag(5, 4, mode="sum"), torch.tensor([0, 2, 4])
    path = tmp_path / "m.pt2"
    torch.export.save(export(bags, (torch.arange(5), offsets)), path)
    run = tilewright.compile(path)
    assert torch.allclose(run(torch.arange(5), offsets), bags(torch.arange(5), offsets))  # type: ignore[arg-type]
    made = run(torch.arange(5), torch.tensor([0, 4, -(1 << 40)]))
    assert torch.allclose(made, bags(torch.arange(5), torch.tensor([0, 4, 4])))  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_refused_in_words() -> None:
    program = export(nn.Linear(4, 4), (torch.ones(3, 4),))
    program.state_dict["bias"] = nn.Parameter(torch.ones(2))
    with pytest.raises(ModelError, match="refuse this program"):
        captured_program(program, "here")


HONEST: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "batch norm": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), (torch.ones(2, 1, 3, 3),)),
    "attention": (nn.MultiheadAttention(4, 2).eval(), (torch.ones(2, 3, 4),) * 3),
    "bags": (nn.EmbeddingBag(5, 2), (torch.ones(2, 2, dtype=torch.int64),)),
    "branches": (
        Program(lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))), (torch.ones(3),)
    ),
    "places": (Program(lambda x: x.as_strided((3, 2), (2, 1)) + torch.empty(2).fill_(1.0)), (torch.ones(4, 4),)),
    "spectra": (Program(lambda x: torch.fft.irfft(torch.fft.rfft(x))), (torch.ones(8),)),
}  # fmt: skip


@pytest.mark.parametrize("what", HONEST)
def test_honest_programs_are_taken(what: str) -> None:
    module, given = HONEST[what]
    check_as_given(export(module, given), "here")


@pytest.mark.parametrize("factory", [list, int])
def test_sample_inputs_may_be_dicts_with_defaults(factory: Callable[[], object], tmp_path: Path) -> None:
    given = collections.defaultdict(factory, a=torch.ones(2), b=torch.ones(2))
    path = tmp_path / "m.pt2"
    torch.export.save(export(Program(lambda d: d["a"] + d["b"] * 2), (given,)), path)
    assert torch.equal(tilewright.compile(path)(given), torch.full((2,), 3.0))  # type: ignore[arg-type]
