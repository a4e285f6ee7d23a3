"""The text recognition models of the demo: eager and exported with dynamic sizes, against onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from demo.weights import FOLDER, OCR, missing
from torch.export import Dim

from tilewright.capture.onnx import OnnxModule, bind_inputs, load

pytestmark = [
    pytest.mark.skipif(
        bool(missing(OCR)), reason="the demo's model files are not there (make demo fetches them)"
    ),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# name: shapes to run, dynamic dims (detection wants multiples of 32)
CASES: dict[str, tuple[list[tuple[int, ...]], dict[int, object]]] = {
    "detection": (
        [(1, 3, 64, 96), (2, 3, 128, 160), (1, 3, 96, 64)],
        {
            0: Dim("n", min=1, max=64),
            2: 32 * Dim("h", min=1, max=128),
            3: 32 * Dim("w", min=1, max=128),
        },
    ),
    "recognition": (
        [(1, 3, 48, 320), (3, 3, 48, 100), (2, 3, 48, 77)],
        {0: Dim("n", max=64), 3: Dim("w", min=16, max=4096)},
    ),
    "classification": ([(1, 3, 48, 192), (4, 3, 48, 192)], {0: Dim("n", max=64)}),
}


def read(name: str) -> tuple[OnnxModule, onnxruntime.InferenceSession]:
    """The imported model and a single-threaded session on the same file."""
    path = Path(FOLDER) / "ocr" / f"{name}.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return load(path), onnxruntime.InferenceSession(str(path), options)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_onnxruntime(name: str) -> None:
    """Eager and one exported graph, at several sizes, to 1e-4."""
    module, session = read(name)
    shapes, dims = CASES[name]
    assert not module.data_dependent
    generator = np.random.default_rng(0)
    arrays = [generator.uniform(-1, 1, s).astype(np.float32) for s in shapes]
    with torch.no_grad():
        example = torch.from_numpy(np.repeat(arrays[1], 2, 0))
        program = torch.export.export(module, (example,), dynamic_shapes=((dims,),), strict=False)
        targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
        assert not any("item" in t or "index" in t or "assert" in t for t in targets)
        exported = program.module()
        for array in arrays:
            (want,) = session.run(None, {session.get_inputs()[0].name: array})
            for run in (module, exported):
                have = run(*bind_inputs(module, [array], {}))
                np.testing.assert_allclose(want, have.numpy(), atol=1e-4)


def test_character_list() -> None:
    """Recognition carries its characters as metadata: 6,623 of them, for 6,625 outputs."""
    module, _ = read("recognition")
    assert len(module.metadata["character"].splitlines()) == 6623
    assert module.input_specs[0].dims == (None, 3, None, None)
