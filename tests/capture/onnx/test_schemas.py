"""The operator table against the standard's own schemas, at every version from opset 7 on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import defs, helper
from tests.support.onnx_models import model, node, value

from tilewright.capture.onnx import load
from tilewright.capture.onnx.control import BUILDERS
from tilewright.capture.onnx.registry import OpDef, lookup

# Strings, images: no torch tensor holds what they work on.
LEFT_OUT = {
    "ImageDecoder",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
}
ATTRIBUTES_LEFT_OUT = {("Constant", name) for name in ("sparse_value", "value_string", "value_strings")}
# Defaults that are written in another way but mean the same.
OTHER_DEFAULTS = {
    ("Clip", "max"),
    ("Clip", "min"),
    ("GridSample", "mode"),
    ("MeanVarianceNormalization", "axes"),
    ("RNN", "activations"),
}


def schemas() -> Iterator[defs.OpSchema]:
    """All versions of the standard operators that a model of opset 7 or newer can mean."""
    everything = [s for s in defs.get_all_schemas_with_history() if s.domain == ""]
    for schema in everything:
        newer = [s.since_version for s in everything if s.name == schema.name]
        overtaken = any(schema.since_version < v <= 7 for v in newer)
        if not overtaken and not schema.deprecated and ("", schema.name) not in BUILDERS:
            yield schema


def entry_for(schema: defs.OpSchema) -> OpDef | None:
    """What the table has for a schema."""
    return lookup("", schema.name, max(7, schema.since_version))


def test_every_operator_has_a_meaning() -> None:
    missing = {s.name for s in schemas() if entry_for(s) is None and not s.has_function}
    assert missing == LEFT_OUT


def test_attributes_and_inputs_are_those_of_the_standard() -> None:
    wrong: list[str] = []
    for schema in schemas():
        entry = entry_for(schema)
        if entry is None:
            continue
        where = f"{schema.name}-{schema.since_version}"
        for name in set(schema.attributes) - entry.names:
            if (schema.name, name) not in ATTRIBUTES_LEFT_OUT:
                wrong.append(f"{where}: no attribute {name}")
        if entry.most is not None and len(schema.inputs) > entry.most:
            wrong.append(f"{where}: {len(schema.inputs)} inputs")
        single = sum(i.option == defs.OpSchema.FormalParameterOption.Single for i in schema.inputs)
        if entry.most is not None and entry.least > single:
            wrong.append(f"{where}: needs {entry.least} inputs")
    assert not wrong


def test_defaults_are_those_of_the_standard() -> None:
    wrong: list[str] = []
    for schema in schemas():
        entry = entry_for(schema)
        if entry is None:
            continue
        parameters = inspect.signature(entry.function).parameters
        for name, attribute in schema.attributes.items():
            if name not in entry.names or (schema.name, name) in OTHER_DEFAULTS:
                continue
            have = parameters[name].default
            if attribute.default_value.type == onnx.AttributeProto.UNDEFINED:
                if not attribute.required and have is inspect.Parameter.empty:
                    wrong.append(f"{schema.name}-{schema.since_version}: {name} is optional")
                continue
            want = helper.get_attribute_value(attribute.default_value)
            want = want.decode() if isinstance(want, bytes) else want
            close = isinstance(want, float) and isinstance(have, (int, float)) and abs(want - have) < 1e-6
            if have != want and not close:
                wrong.append(f"{schema.name}-{schema.since_version}: {name} is {want!r}, not {have!r}")
    assert not wrong


def test_max_roi_pool_against_onnxruntime() -> None:
    """An operator without a case in the backend suite."""
    nodes = [node("MaxRoiPool", ["x", "r"], ["y"], pooled_shape=[3, 2], spatial_scale=0.5)]
    m = model(nodes, [value("x", [2, 3, 9, 11]), value("r", [4, 5])], ["y"])
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 11)).astype(np.float32)
    r = np.array([[0, 0, 0, 10, 10], [1, 3, 5, 15, 16], [0, 8, 8, 9, 9], [1, 2, 2, 21, 17]], np.float32)
    (want,) = onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x, "r": r})
    np.testing.assert_allclose(load(m)(torch.from_numpy(x), torch.from_numpy(r)).numpy(), want)
