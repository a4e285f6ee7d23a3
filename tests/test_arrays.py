"""Arrays of numpy at the entry points: every way they lie in memory, every element type, results in kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import tilewright
from tilewright.arrays import array_of_tensor, tensor_of_array
from tilewright.errors import InputError

BASE = np.arange(24, dtype=np.float32).reshape(4, 6) - 7


def _in_record() -> np.ndarray:
    made = np.zeros(6, dtype=[("a", "<i2"), ("b", "<f4")])
    made["b"] = BASE[0]
    return made["b"]


def _unaligned() -> np.ndarray:
    return np.frombuffer(b"x" + BASE.tobytes(), np.float32, offset=1)


def _read_only() -> np.ndarray:
    made = BASE.copy()
    made.flags.writeable = False
    return made


LAYOUTS: dict[str, Callable[[], np.ndarray]] = {
    "plain": BASE.copy,
    "negative rows": lambda: BASE[::-1],
    "negative columns": lambda: BASE[:, ::-2],
    "big-endian": lambda: BASE.astype(">f4"),
    "read-only": _read_only,
    "unaligned": _unaligned,
    "field of records": _in_record,
    "columns first": lambda: np.asfortranarray(BASE),
    "repeated": lambda: np.broadcast_to(BASE[:1], (3, 6)),
    "scalar": lambda: np.float32(3),
    "rank 0": lambda: np.array(3, np.float32),
    "rank 0, big-endian": lambda: np.array(3, ">f4"),
    "empty": lambda: BASE[:0, ::-1],
}  # fmt: skip


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_arrays_of_every_layout_become_tensors(layout: str) -> None:
    array = np.asanyarray(LAYOUTS[layout]())
    made = tensor_of_array(array)
    assert made.shape == array.shape and made.dtype == torch.float32
    assert np.array_equal(made.numpy(), np.asarray(array))


def test_compiled_functions_take_every_layout() -> None:
    """The second call takes the short way. A scalar alone is no array: it gives a tensor."""
    compiled = tilewright.compile(lambda x: x * 2 + 1)
    for layout in (*LAYOUTS, *LAYOUTS):
        got = compiled(LAYOUTS[layout]())
        wanted = np.asarray(LAYOUTS[layout]()) * 2 + 1
        assert isinstance(got, torch.Tensor if layout == "scalar" else np.ndarray)
        assert np.array_equal(np.asarray(got), wanted) and got.shape == wanted.shape


EXTENDED = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
PLAIN = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("name", [*EXTENDED, *PLAIN, "longlong", "ulonglong"])
def test_every_element_type_there_and_back(name: str) -> None:
    kind = getattr(ml_dtypes, name) if name in EXTENDED else np.dtype(name)
    for array in (np.array([1, 2, 4, 0.5]).astype(kind), np.array(1).astype(kind), np.zeros((0, 2), kind)):
        for given in (array, array[::-1] if array.ndim else array):
            back = array_of_tensor(tensor_of_array(given))
            assert back.dtype == np.dtype(kind) and back.shape == given.shape
            assert back.tobytes() == given.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]), np.array([b"a"]), np.array([object()]), np.array([None]),
        np.array(["2020-01-01"], "datetime64[D]"), np.zeros(2, np.longdouble),
        np.zeros(2, [("a", "f4")]), np.zeros(2, ml_dtypes.int4), np.zeros(2, ml_dtypes.float8_e3m4),
        np.ma.masked_array([1.0, 2.0], [True, False]),
    ],
)  # fmt: skip
def test_what_no_tensor_holds_is_refused(array: np.ndarray) -> None:
    compiled = tilewright.compile(lambda x: x)
    with pytest.raises(InputError) as caught:
        compiled(array)
    assert caught.value.place == "input 0" and caught.value.hint
    with pytest.raises(InputError) as caught:
        compiled(x=array)
    assert caught.value.place == "input x"
    with pytest.raises(InputError):
        compiled({"nested": [array]})


def test_results_are_in_kind() -> None:
    """Arrays give arrays, tensors give tensors, both give tensors; nesting stays."""
    compiled = tilewright.compile(lambda x, y: {"sum": x + y, "both": (x, [y * 2]), "n": 3})
    x, y = BASE, BASE[::-1]
    got = compiled(x, y)
    assert got["n"] == 3 and isinstance(got["sum"], np.ndarray) and np.array_equal(got["both"][1][0], y * 2)
    for mixed in (compiled(torch.tensor(x), y), compiled(torch.tensor(x), torch.tensor(y.copy()))):
        assert isinstance(mixed["sum"], torch.Tensor) and isinstance(mixed["both"][1][0], torch.Tensor)


def test_scalars_of_numpy_again_and_again() -> None:
    """A call that was seen before takes the short way, which knows tensors only."""
    compiled = tilewright.compile(lambda x, s: x * s)
    x = torch.ones(3)
    for s in (np.float32(2), np.float32(2), np.float32(3), np.float32(3), np.int64(4), np.int64(4)):
        assert torch.equal(compiled(x, s), x * float(s))
        assert torch.equal(compiled(x, s=s), x * float(s))


def test_arrays_receive_outputs() -> None:
    compiled = tilewright.compile(lambda x: x + 1)
    place = np.zeros_like(BASE)
    for _ in range(2):
        got = compiled(BASE, out=place)
        assert isinstance(got, np.ndarray) and np.shares_memory(got, place)
        assert np.array_equal(place, BASE + 1)
    for refused in (_read_only(), np.zeros((4, 6), np.float32)[::-1], np.zeros((4, 6), ">f4"), [1.0], "x"):
        with pytest.raises(InputError) as caught:
            compiled(BASE, out=refused)
        assert caught.value.place == "out 0" and caught.value.hint


def cast_model(folder: Path, source: int, target: int) -> Path:
    """A file that casts x of [n]."""
    x = helper.make_tensor_value_info("x", source, ["n"])
    y = helper.make_tensor_value_info("y", target, None)
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=target)], "g", [x], [y])
    path = folder / "cast.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_files_take_and_give_halves_and_eighths(tmp_path: Path) -> None:
    wide = np.array([1.0, -2.5, 0.4375, 0.0], np.float32)
    for kind, code in (
        (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
        (ml_dtypes.float8_e4m3fn, TensorProto.FLOAT8E4M3FN),
        (ml_dtypes.float8_e5m2, TensorProto.FLOAT8E5M2),
    ):
        narrow = wide.astype(kind)
        got = tilewright.compile(cast_model(tmp_path, code, TensorProto.FLOAT))(narrow[::-1])
        assert got.dtype == np.float32 and np.array_equal(got, narrow[::-1].astype(np.float32))
        back = tilewright.compile(cast_model(tmp_path, TensorProto.FLOAT, code))(x=wide)
        assert back.dtype == narrow.dtype and back.tobytes() == narrow.tobytes()


@pytest.mark.parametrize("value", [[1.0, 2.0], object(), "text", None, {"a": 1}, b"\0\0"])
def test_files_refuse_what_is_no_array(tmp_path: Path, value: object) -> None:
    compiled = tilewright.compile(cast_model(tmp_path, TensorProto.FLOAT, TensorProto.DOUBLE))
    for call in (lambda: compiled(value), lambda: compiled(x=value)):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.place == "input x" and caught.value.hint
