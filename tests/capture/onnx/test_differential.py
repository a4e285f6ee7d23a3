"""Random attributes and shapes, against onnxruntime."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.support.onnx_models import ints, model, node, value

from tilewright.capture.onnx import load

Nodes = list[onnx.NodeProto]
Constants = dict[str, np.ndarray]
Maker = Callable[[random.Random], tuple[onnx.NodeProto, list[np.ndarray], Constants, int]]

GENERATOR = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Random floats."""
    return GENERATOR.standard_normal(shape).astype(np.float32)


def windows(r: random.Random, dilate: bool = True) -> tuple[list[int], dict[str, object]]:
    """A spatial shape and window attributes that leave an output."""
    rank = r.choice([1, 2, 2, 3])
    sizes = [r.randint(5, 9) for _ in range(rank)]
    kernel = [r.randint(1, 3) for _ in range(rank)]
    attributes: dict[str, object] = {
        "kernel_shape": kernel,
        "strides": [r.randint(1, 3) for _ in range(rank)],
    }
    mode = r.choice(["pads", "SAME_UPPER", "SAME_LOWER", "VALID", ""])
    if mode == "pads":
        attributes["pads"] = [r.randint(0, k - 1) for k in kernel * 2]
    elif mode:
        attributes["auto_pad"] = mode
        if mode.startswith("SAME"):  # a step past the window would mean negative padding: peers differ
            attributes["strides"] = [r.randint(1, k) for k in kernel]
    if dilate and not mode.startswith("SAME"):
        attributes["dilations"] = [r.randint(1, 2) for _ in range(rank)]
    return sizes, attributes


def conv(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Groups, dilations, uneven and automatic padding."""
    sizes, attributes = windows(r)
    group = r.choice([1, 2])
    weight = normal(3 * group, 2, *attributes["kernel_shape"])  # type: ignore[misc]
    made = node("Conv", ["x", "w", "b"], ["y"], group=group, **attributes)
    return made, [normal(2, 2 * group, *sizes)], {"w": weight, "b": normal(3 * group)}, 17


def conv_transpose(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Padding that cuts, output padding that extends."""
    sizes, attributes = windows(r)
    attributes.pop("auto_pad", None)
    strides: list[int] = attributes["strides"]  # type: ignore[assignment]
    attributes["output_padding"] = [r.randint(0, s - 1) for s in strides]
    group = r.choice([1, 2])
    weight = normal(2 * group, 3, *attributes["kernel_shape"])  # type: ignore[misc]
    made = node("ConvTranspose", ["x", "w", "b"], ["y"], group=group, **attributes)
    return made, [normal(2, 2 * group, *sizes)], {"w": weight, "b": normal(3 * group)}, 17


def average_pool(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Rounding up, padding counted or not."""
    sizes, attributes = windows(r, dilate=False)
    if not str(attributes.get("auto_pad", "")).startswith("SAME"):
        attributes["ceil_mode"] = r.randint(0, 1)
    made = node("AveragePool", ["x"], ["y"], count_include_pad=r.randint(0, 1), **attributes)
    return made, [normal(2, 3, *sizes)], {}, r.choice([11, 17, 19, 21])


def max_pool(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Rounding up, dilations."""
    sizes, attributes = windows(r)
    if not str(attributes.get("auto_pad", "")).startswith("SAME"):
        attributes["ceil_mode"] = r.randint(0, 1)
    return node("MaxPool", ["x"], ["y"], **attributes), [normal(2, 3, *sizes)], {}, 17


def slices(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Bounds far outside, steps in both directions."""
    axes = r.sample([0, 1, 2], 2)
    far = 2**62
    constants = {
        "a": ints(*[r.randint(-8, 8) for _ in axes]),
        "b": ints(*[r.choice([r.randint(-8, 8), far, -far]) for _ in axes]),
        "c": ints(*[a - r.choice([0, 3]) for a in axes]),
        "d": ints(*[r.choice([-3, -1, 1, 2]) for _ in axes]),
    }
    shape = [r.randint(1, 6) for _ in range(3)]
    return node("Slice", ["x", "a", "b", "c", "d"], ["y"]), [normal(*shape)], constants, 17


def pads(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """All modes; constant padding may crop."""
    mode = r.choice(["constant", "reflect", "edge", "wrap"])
    low = -1 if mode == "constant" else 0
    amounts = ints(*[r.randint(low, 2) for _ in range(6)])
    shape = [r.randint(3, 6) for _ in range(3)]
    return node("Pad", ["x", "p"], ["y"], mode=mode), [normal(*shape)], {"p": amounts}, 19


def resize(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Sizes given: the modes on which the standard's reference and onnxruntime agree."""
    mode = r.choice(["nearest", "linear", "cubic"])
    places = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]
    attributes = {"mode": mode, "coordinate_transformation_mode": r.choice(places)}
    if mode == "nearest":
        attributes["nearest_mode"] = r.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
        target = ints(1, 2, *[n * r.choice([1, 2, 4]) for n in (3, 5)])
    else:
        target = ints(1, 2, r.randint(2, 12), r.randint(2, 12))
    return node("Resize", ["x", "", "", "s"], ["y"], **attributes), [normal(1, 2, 3, 5)], {"s": target}, 19


def grid_sample(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Points inside and outside the picture."""
    made = node(
        "GridSample",
        ["x", "g"],
        ["y"],
        mode=r.choice(["bilinear", "nearest", "bicubic"]),
        padding_mode=r.choice(["zeros", "border", "reflection"]),
        align_corners=r.randint(0, 1),
    )
    return made, [normal(1, 2, 5, 4)], {"g": normal(1, 3, 6, 2)}, 16


def recurrent(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Directions and ragged lengths."""
    name, gates = r.choice([("RNN", 1), ("GRU", 3), ("LSTM", 4)])
    direction = r.choice(["forward", "reverse", "bidirectional"])
    count = 2 if direction == "bidirectional" else 1
    hidden, steps, batch, features = (r.randint(1, 4) for _ in range(4))
    attributes: dict[str, object] = {"hidden_size": hidden, "direction": direction}
    if name == "GRU":
        attributes["linear_before_reset"] = r.randint(0, 1)
    constants = {
        "w": normal(count, gates * hidden, features),
        "r": normal(count, gates * hidden, hidden),
        "b": normal(count, 2 * gates * hidden),
        "l": np.array([r.randint(1, steps) for _ in range(batch)], np.int32),
    }
    made = node(name, ["x", "w", "r", "b", "l"], ["y"], **attributes)
    return made, [normal(steps, batch, features)], constants, 17


def reductions(r: random.Random) -> tuple[onnx.NodeProto, list[np.ndarray], Constants, int]:
    """Any set of axes."""
    names = ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"]
    axes = r.sample([0, 1, 2], r.randint(1, 3))
    made = node(r.choice(names), ["x"], ["y"], axes=axes, keepdims=r.randint(0, 1))
    return made, [normal(3, 4, 5)], {}, 17


MAKERS: list[Maker] = [
    conv,
    conv_transpose,
    average_pool,
    max_pool,
    slices,
    pads,
    resize,
    grid_sample,
    recurrent,
    reductions,
]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda m: m.__name__)
def test_agrees_with_onnxruntime(maker: Maker) -> None:
    """Twenty random cases of one family."""
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for seed in range(20):
        made, (x,), constants, opset = maker(random.Random(seed))
        m = model([made], [value("x", list(x.shape))], ["y"], constants, opset)
        (want,) = onnxruntime.InferenceSession(m.SerializeToString(), options).run(None, {"x": x})
        with torch.no_grad():
            have = load(m)(torch.from_numpy(x)).numpy()
        assert want.shape == have.shape, (seed, made)
        np.testing.assert_allclose(want, have, rtol=1e-3, atol=1e-4, err_msg=f"seed {seed}: {made}")
