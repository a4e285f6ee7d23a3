"""A model cut at the nodes that read data computes the same; what lies between can be exported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from benchmarks.onnx_suite.cases import cases, plain
from benchmarks.onnx_suite.judge import differs
from onnx import helper
from tests.capture.onnx import suite
from tests.support.onnx_models import model, node, pipeline, value
from torch.export import Dim

from tilewright.arrays import as_arrays
from tilewright.capture.onnx import OnnxModule, Split, load, split

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")


def check(module: OnnxModule, cut: Split, *inputs: torch.Tensor) -> None:
    """The segments in order give what the whole gives."""
    with torch.no_grad():
        whole = module(*inputs)
        parts = cut.run(inputs)
    wholes = whole if isinstance(whole, tuple) else (whole,)
    for a, b in zip(wholes, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_segments_alternate_and_agree() -> None:
    module = load(pipeline())
    cut = split(module)
    assert [s.library for s in cut.segments] == [False, True, False, True]
    assert ["first" in s.nodes[0] for s in cut.segments if s.library] == [True, False]
    assert module.data_dependent == tuple(n for s in cut.segments for n in s.nodes)
    for n in (1, 2, 5):
        for sign in (1.0, -1.0, 0.01):
            check(module, cut, torch.randn(n, 4) * sign)


def test_compiled_segments_export_with_dynamic_sizes() -> None:
    module = load(pipeline())
    cut = split(module)
    n = Dim("n", min=2, max=64)
    x = torch.randn(4, 4)
    values: dict[int, object] = dict(zip(cut.inputs, (x,), strict=True))
    calls: list[object] = []
    with torch.no_grad():
        for segment in cut.segments:
            args = tuple(values[i] for i in segment.reads)
            if segment.library:
                calls.append(segment.module)
            else:
                dims = tuple({0: n} for _ in args)
                program = torch.export.export(segment.module, args, dynamic_shapes=(dims,), strict=False)
                calls.append(program.module())
            result = segment.module(*args)
            values.update(
                zip(segment.writes, result if isinstance(result, tuple) else (result,), strict=True)
            )
        for size in (4, 9):
            x = torch.randn(size, 4)
            for a, b in zip(module(x), cut.run((x,), calls), strict=True):  # type: ignore[arg-type]
                torch.testing.assert_close(a, b)


def test_without_data_there_is_one_segment() -> None:
    m = model([node("Relu", ["x"], ["y"])], [value("x", [3])], ["y"])
    cut = split(load(m))
    assert [s.library for s in cut.segments] == [False]
    assert torch.equal(cut.run((torch.ones(3),))[0], torch.ones(3))


def test_outputs_that_are_inputs_or_constants() -> None:
    graph = helper.make_graph(
        [node("Identity", ["x"], ["y"]), node("Constant", [], ["k"], value_float=2.0)],
        "g",
        [value("x", [3])],
        [value("y", [3]), value("k", []), value("x", [3]), value("w", [2])],
        [onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")],
    )
    module = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    check(module, split(module), torch.randn(3))


def test_suite_cases_that_read_data() -> None:
    """Every case of the backend suite that reads data, cut and run in parts."""
    count = 0
    for case in cases():
        try:
            module = load(case.model)
        except Exception:  # noqa: BLE001  (cases that are left out)
            continue
        if not module.data_dependent or "dropout" in case.name:
            continue
        inputs, expected = case.data_sets[0]
        with torch.no_grad():
            parts = split(module).run([suite.to_torch(plain(v)) for v in inputs])  # type: ignore[misc]
        for want, have in zip(expected, parts, strict=True):
            assert not differs(plain(want), as_arrays(have), 1e-3, 1e-6), case.name
        count += 1
    assert count > 200
