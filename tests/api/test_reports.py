"""What users are told: which graphs were compiled, whose code runs each op, what counts."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.runtime.plan.layouts import intermediate_bytes


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def chain(x: Tensor) -> Tensor:
    """Two elementwise ops and a library call."""
    return torch.topk(torch.relu(x) * 2, 2).values


# --- compilations ----------------------------------------------------------------


def test_graphs_of_torch_compile_can_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(chain, backend="tilewright")
    with caplog.at_level(logging.INFO, logger="tilewright"):
        compiled(torch.randn(3, 5))
    (one,) = tilewright.compilations()
    assert one.kind == "inference" and one.coverage.ops == 3 and len(one.kernels) == 1
    assert [c.name for c in one.calls] == ["aten.topk"] and one.calls[0].how == "need"
    assert one.trace["capture"] and "k0" in one.kernels[0].source
    assert f"inference graph: {one.coverage}" in caplog.text


def test_graphs_of_one_model_are_told_apart() -> None:
    compiled = tilewright.compile(lambda x: torch.relu(x) * 2)
    compiled(torch.randn(3))
    compiled(torch.randn(3, dtype=torch.float64))
    assert str(compiled.coverage) == "generated 4 of 4 ops in 2 kernels of 2 graphs"
    assert [repr(g).rpartition("; ")[2] for g in compiled.compilations] == ["takes f32[3]", "takes f64[3]"]


def test_both_graphs_of_a_training_step_are_listed() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    torch.compile(chain, backend="tilewright")(x).sum().backward()
    assert sorted(c.kind for c in tilewright.compilations()) == ["backward", "forward"]


def test_a_graph_that_is_gone_is_not_listed() -> None:
    kept, gone = (
        tilewright.compile(chain, (torch.randn(3, 5),)),
        tilewright.compile(chain, (torch.randn(4, 5),)),
    )
    assert len(tilewright.compilations()) == 2
    del gone
    torch._dynamo.reset()
    gc.collect()
    (left,) = tilewright.compilations()
    assert left.coverage == kept.coverage
    tilewright.reset()
    assert tilewright.compilations() == ()


# --- whose code ------------------------------------------------------------------


def test_our_own_routines_are_named_as_such() -> None:
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).eval()
    with torch.no_grad():
        compiled = tilewright.compile(net, (torch.randn(128, 64),), freeze=True, strict=True)
    line = str(compiled.coverage)
    assert "in routines of our own: aten.addmm x2 (contraction)" in line and "library" not in line
    assert [(c.name, c.how) for c in compiled.calls] == [("linear", "own")] * 2  # type: ignore[attr-defined]
    assert "aten.gelu" in compiled.calls[0].ops  # type: ignore[attr-defined]


def test_products_of_the_library_stay_a_choice() -> None:
    compiled = tilewright.compile(torch.mm, (torch.randn(80, 80), torch.randn(80, 80)))
    assert "1 as library calls by choice: aten.mm x1 (contraction)" in str(compiled.coverage)
    assert compiled.calls[0].how == "choice"  # type: ignore[attr-defined]


def test_calls_have_figures_of_what_they_compute() -> None:
    compiled = tilewright.compile(
        lambda a, b: torch.mm(a, b).softmax(-1), (torch.randn(80, 160), torch.randn(160, 32))
    )
    (call,), (kernel,) = compiled.calls, compiled.kernels  # type: ignore[misc]
    assert (call.name, call.exps, kernel.exps) == ("aten.mm", 0, 80 * 32)
    assert call.flops == 2 * 80 * 160 * 32 and call.bytes_moved == 4 * (80 * 160 + 160 * 32 + 80 * 32)
    assert call.seconds > 0
    (graph,) = tilewright.compilations()
    assert intermediate_bytes(graph.trace["plan"], {}) == 4 * 80 * 32  # type: ignore[arg-type]


def test_what_has_no_declaration_has_no_figures() -> None:
    (call,) = tilewright.compile(chain, (torch.randn(3, 5),), dims={"x": {0: "n"}}).calls
    assert (call.flops, call.exps, call.seconds) == (None, None, None)  # type: ignore[attr-defined]
    assert call.bytes_moved == 4 * 3 * 5 + (4 + 8) * 3 * 2  # type: ignore[attr-defined]
    (graph,) = tilewright.compilations()
    plan = graph.trace["plan"]
    assert intermediate_bytes(plan, {}) is None  # type: ignore[arg-type]
    assert intermediate_bytes(plan, call.sizes) > 0  # type: ignore[arg-type,operator,attr-defined]


# --- what counts -----------------------------------------------------------------


def test_checks_are_neither_counted_nor_refused() -> None:
    def program(x: Tensor, mask: Tensor) -> Tensor:
        n = mask.sum().item()
        torch._check(n >= 2)
        torch._check(n <= 7)
        return x.relu() * n

    x, places = torch.randn(4), torch.arange(9)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = tilewright.compile(program)
        torch.testing.assert_close(compiled(x, places < 3), x.relu() * 3)
    for count in (1, 9):  # the range that it asserts must not prove the assertion
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            compiled(x, places < count)
    assert "_assert" not in str(compiled.coverage)
    assert compiled.coverage.refused() == ("aten._local_scalar_dense",)
    assert [c.reason for c in compiled.calls].count("check") == 2  # type: ignore[attr-defined]


def test_a_size_is_bound_where_only_the_size_is_read() -> None:
    def program(x: Tensor) -> Tensor:
        return x.relu() * x.nonzero().shape[0]

    x = torch.tensor([0.0, 2.0, 3.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = tilewright.compile(program)
        torch.testing.assert_close(compiled(x), x * 2)


def test_builtins_compile() -> None:
    """They tell no names of their parameters."""
    x = torch.randn(3)
    torch.testing.assert_close(tilewright.compile(torch.sin, (x,))(x), x.sin())


def test_a_graph_that_runs_as_captured_counts_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.errors import UnsupportedError

    def program(x: Tensor) -> Tensor:
        return (x.t().reshape(-1) * 2).split(3)[0].relu()

    x = torch.randn(3, 4)
    counted = tilewright.compile(program, (x,)).coverage.ops

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("not today", phase="capture")

    monkeypatch.setattr("tilewright.pipeline.compiler.from_fx", refuse)
    tilewright.reset()
    assert tilewright.compile(program, (x,)).coverage.ops == counted


def test_phases_run_without_the_cycle_collector() -> None:
    import gc

    from tilewright.pipeline.compiler import without_collector

    assert gc.isenabled()
    with pytest.raises(ValueError), without_collector():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_bytes_are_those_that_are_asked_for() -> None:
    """Of a table the lines that are looked up, of a slice the slice, and all of it where more is asked for."""
    table, few, many = torch.randn(1000, 64), torch.arange(4), torch.arange(900).repeat(8)
    fast = tilewright.compile(lambda t, i: t[i] * 2)
    fast(table, few)
    (kernel,) = fast.kernels
    assert kernel.bytes_moved == 8 * 4 + 4 * 2 * 4 * 64  # type: ignore[attr-defined]
    whole = tilewright.compile(lambda t, i: t[i] * 2)
    whole(table, many)
    (kernel,) = whole.kernels
    assert kernel.bytes_moved == 8 * 7200 + 4 * 64 * (1000 + 7200)  # type: ignore[attr-defined]
    part = tilewright.compile(lambda t: t[:10].exp())
    part(table)
    (kernel,) = part.kernels
    assert kernel.bytes_moved == 4 * 64 * 20  # type: ignore[attr-defined]


def test_padding_is_no_work() -> None:
    """A convolution has two operations for each tap of each result, in the padding too."""
    weight = torch.randn(8, 4, 3, 3)
    compiled = tilewright.compile(lambda x: torch.conv2d(x, weight, padding=1), (torch.randn(1, 4, 32, 32),))
    (done,) = (*compiled.calls, *compiled.kernels)
    assert done.flops == 2 * 8 * 4 * 9 * 32 * 32  # type: ignore[attr-defined]
