"""Files of exported programs that hold more than data: none of it runs, and honest files are taken."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from tilewright.errors import ModelError
from tilewright.ways.harmless_programs import check_archive
from tilewright.ways.harmless_texts import is_guard, is_size
from tilewright.ways.program_loader import load_program

Model = dict[str, Any]
SIZE = "Symbol('s77', positive=True, integer=True)"
FUNCTIONS = ("Symbol", "Integer", "Mul", "Add", "Max", "Pow", "FloorDiv", "LShift")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * x.shape[0]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "m.pt2"
    torch.export.save(export(Net(), (torch.ones(3, 4),), dynamic_shapes=({0: Dim("batch")},)), path)
    return path


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def rewritten(
    honest: Path, to: Path, edit: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None
) -> Path:
    """The file with other records."""
    with zipfile.ZipFile(honest) as given, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as made:
        root = given.namelist()[0].split("/")[0]
        for name in given.namelist():
            made.writestr(name, edit(name.split("/", 1)[1], given.read(name)))
        for name, data in (more or {}).items():
            made.writestr(f"{root}/{name}", data)
    return to


def with_model(honest: Path, to: Path, edit: Callable[[Model], object]) -> Path:
    """The file with another graph."""

    def changed(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        model = json.loads(data)
        edit(model)
        return json.dumps(model).encode()

    return rewritten(honest, to, changed)


def test_an_honest_file_is_taken(honest: Path, tmp_path: Path) -> None:
    same = with_model(honest, tmp_path / "same.pt2", lambda model: None)
    made = load_program(str(same)).module()(torch.ones(2, 4))
    assert made.shape == (2, 4)


def _pickled(made: object) -> bytes:
    data = io.BytesIO()
    torch.save(made, data)
    return data.getvalue()


def test_pickled_records_are_not_opened(honest: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    data = _pickled((Touches(ran),))

    def inputs(name: str, given: bytes) -> bytes:
        return data if name.startswith("data/sample_inputs/") else given

    def weight(name: str, given: bytes) -> bytes:
        if not name.endswith("model_weights_config.json"):
            return data if name == "data/weights/weight_1" else given
        listed = json.loads(given)
        listed["config"]["layer.bias"]["use_pickle"] = True
        return json.dumps(listed).encode()

    def constant(name: str, given: bytes) -> bytes:
        if not name.endswith("model_constants_config.json"):
            return given
        told = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        return json.dumps({"config": {"c": told}}).encode()

    def same(name: str, given: bytes) -> bytes:
        return given

    files = [
        rewritten(honest, tmp_path / "inputs.pt2", inputs),
        rewritten(honest, tmp_path / "weight.pt2", weight),
        rewritten(honest, tmp_path / "constant.pt2", constant, {"data/constants/opaque_obj_0": data}),
        rewritten(honest, tmp_path / "legacy.pt2", same, {"data/weights/model.pt": data}),
        rewritten(honest, tmp_path / "library.pt2", same, {"data/aotinductor/model/m.so": b"\x7fELF"}),
    ]
    for file in files:
        with pytest.raises(ModelError, match="may run code"):
            load_program(str(file))
    assert not ran.exists()


def _calls(target: str, *given: object) -> Callable[[Model], None]:
    def edit(model: Model) -> None:
        node = model["graph_module"]["graph"]["nodes"][2]
        node["target"] = target
        node["inputs"] = [{"name": "x", "arg": a, "kind": 1} for a in given]

    return edit


def _sized(text: str) -> Callable[[Model], None]:
    def edit(model: Model) -> None:
        model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

    return edit


def _nested(spec: object) -> Callable[[Model], None]:
    def edit(model: Model) -> None:
        model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, spec])

    return edit


ENUM = json.dumps({"__enum__": True, "fqn": "antigravity:X", "name": "x"})
MODELS: dict[str, Callable[[Model], object]] = {
    "a call of Python": _calls("torch.os.mkdir", {"as_string": "ran"}),
    "a file": _calls("torch.ops.aten.from_file.default", {"as_string": "/etc/passwd"}),
    "an op of scripts": _calls("torch.ops.prim.Print.default"),
    "an unknown op": _calls("torch.ops.nobodys.op.default"),
    "an operator of Python": _calls("_operator.attrgetter", {"as_string": "x"}),
    "a size": _sized("__import__('os').mkdir('ran')"),
    "a guard": lambda m: m.update(guards_code=["__import__('os').mkdir('ran') is None"]),
    "a structure": _nested({"type": "builtins.tuple", "context": ENUM, "children_spec": []}),
    "a factory": _nested(
        {"type": "collections.defaultdict", "children_spec": [],
         "context": {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}}
    ),
    "a count": lambda m: m["range_constraints"].update(u999999999={"min_val": 0, "max_val": None}),
}  # fmt: skip


@pytest.mark.parametrize("what", MODELS)
def test_graphs_that_torch_would_run_are_refused(
    what: str, honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="may run code"):
        load_program(str(with_model(honest, tmp_path / "bad.pt2", MODELS[what])))
    assert not (tmp_path / "ran").exists()


def test_a_weight_without_bytes_has_no_elements(honest: Path, tmp_path: Path) -> None:
    def emptied(name: str, data: bytes) -> bytes:
        return b"" if name == "data/weights/weight_1" else data

    with pytest.raises(ModelError, match="has elements"):
        load_program(str(rewritten(honest, tmp_path / "m.pt2", emptied)))


def test_records_are_not_larger_than_the_file(honest: Path, tmp_path: Path) -> None:
    packed = tmp_path / "m.pt2"
    with zipfile.ZipFile(honest) as given, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name in given.namelist():
            made.writestr(name, given.read(name))
        made.writestr(given.namelist()[0].split("/")[0] + "/extra/zeros", bytes(1 << 24))
    with pytest.raises(ModelError, match="larger than the file"):
        load_program(str(packed))


def test_no_file_of_another_kind_is_looked_for(tmp_path: Path) -> None:
    """Torch's loader would unpickle what an earlier version wrote."""
    old = tmp_path / "old.pt2"
    with zipfile.ZipFile(old, "w") as made:
        made.writestr("version", "8.1")
        made.writestr("serialized_state_dict.json", _pickled((Touches(tmp_path / "ran"),)))
    with pytest.raises(ModelError):
        load_program(str(old))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", [SIZE, f"Mul(Integer(2), Pow({SIZE}, Integer(2)))", f"Max(Integer(1), {SIZE})", "2*s3 + 1", "17"]
)
def test_sizes_are_arithmetic(text: str) -> None:
    assert is_size(text, FUNCTIONS)


@pytest.mark.parametrize(
    "text",
    [
        "exec(chr(105))", "open(s1)", "s1.__class__", "().__class__", "[x for x in ()]", "(lambda: 1)()", "exec",
        "Integer(10)**Integer(10)**Integer(10)", "Pow(Integer(10), Integer(10**9))",
        "LShift(Integer(1), Integer(1<<40))", "Symbol(s1.x)", "f'{s1}'", "9" * 50, "(" * 5000, "Max(*s1)", "s1[0]",
        "Pow(Pow(Integer(9), Integer(60)), Integer(60))", "Symbol('a b; c')",
    ],
)  # fmt: skip
def test_other_texts_are_no_sizes(text: str) -> None:
    assert not is_size(text, FUNCTIONS)


def test_guards_ask_tensors_for_their_sizes() -> None:
    assert is_guard("(max(1, 1 + (((-3) + L['input'].size()[2]) // 2))) != 1")
    assert is_guard("L['args'][0]['x'].stride()[0] >= 3 and math.trunc(L['y'].size()[0]) > 1")
    for text in (
        "L['x'].__class__",
        "L['x'].tofile('a') is None",
        "open('a')",
        "torch.load('a')",
        "L['x'].size.a()",
    ):
        assert not is_guard(text), text


def test_any_bytes_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    for data in (b"", b"PK\x03\x04", b"\x80\x04.", bytes(1000)):
        path.write_bytes(data)
        with pytest.raises(ModelError):
            load_program(str(path))
        with pytest.raises(RuntimeError):
            check_archive(str(path))
