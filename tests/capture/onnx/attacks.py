"""Hostile model files: each is a file on disk, the inputs to call it with, and what may come of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper
from tests.support.onnx_models import body, ints, model, node, value

SECRET = b"\xde\xad\xbe\xef"
"""What lies outside the model's folder: no result may hold it, and no such file is opened."""


@dataclass(frozen=True)
class Attack:
    """`result`: what a call may return (None: it must be refused with an error of Tilewright's)."""

    path: Path
    inputs: tuple[np.ndarray, ...] = ()
    result: Callable[[], np.ndarray] | None = None


ATTACKS: dict[str, Callable[[Path], Attack]] = {}
X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
IMAGE = np.ones((1, 1, 4, 4), np.float32)
GIANT = 1 << 40


def attack(make: Callable[[Path], Attack]) -> Callable[[Path], Attack]:
    """Enter a fixture under its function's name."""
    ATTACKS[make.__name__] = make
    return make


def write(folder: Path, m: ModelProto) -> Path:
    """The file of a model, in a folder of its own below `folder`."""
    inner = folder / "inner"
    inner.mkdir(exist_ok=True)
    path = inner / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return path


def refused(folder: Path, nodes: Sequence[NodeProto], **constants: np.ndarray) -> Attack:
    """A model of x whose nodes must be refused."""
    return Attack(write(folder, model(nodes, [value("x", [2, 3])], ["y"], constants)), (X,))


# --- data in other files ------------------------------------------------------------


def _external(
    folder: Path, location: str, offset: object = 0, length: object = 24, dims: Sequence[int] = (6,)
) -> Attack:
    m = model([node("Identity", ["w"], ["y"])], [], ["y"], {"w": np.zeros(6, np.float32)})
    tensor = m.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.ClearField("dims")
    tensor.dims.extend(dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    (folder / "secret.bin").write_bytes(SECRET * 6)
    path = write(folder, m)
    (path.parent / "own.bin").write_bytes(b"\0" * 24)
    return Attack(path)


@attack
def external_parent(folder: Path) -> Attack:
    return _external(folder, "../secret.bin")


@attack
def external_parent_through_a_folder(folder: Path) -> Attack:
    made = _external(folder, "sub/../../secret.bin")
    (made.path.parent / "sub").mkdir()
    return made


@attack
def external_absolute(folder: Path) -> Attack:
    return _external(folder, str(folder / "secret.bin"))


@attack
def external_device(folder: Path) -> Attack:
    return _external(folder, "/dev/zero")


@attack
def external_soft_link(folder: Path) -> Attack:
    made = _external(folder, "w.bin")
    (made.path.parent / "w.bin").symlink_to(folder / "secret.bin")
    return made


@attack
def external_hard_link(folder: Path) -> Attack:
    made = _external(folder, "w.bin")
    os.link(folder / "secret.bin", made.path.parent / "w.bin")
    return made


@attack
def external_linked_folder(folder: Path) -> Attack:
    made = _external(folder, "sub/secret.bin")
    (made.path.parent / "sub").symlink_to(folder)
    return made


@attack
def external_pipe(folder: Path) -> Attack:
    made = _external(folder, "w.bin")
    os.mkfifo(made.path.parent / "w.bin")
    return made


@attack
def external_folder(folder: Path) -> Attack:
    made = _external(folder, "sub")
    (made.path.parent / "sub").mkdir()
    return made


@attack
def external_itself(folder: Path) -> Attack:
    """The model's own file is a plain file of its folder: its bytes are what it holds anyway."""
    made = _external(folder, "m.onnx")
    return Attack(made.path, (), lambda: np.frombuffer(made.path.read_bytes()[:24], np.float32))


@attack
def external_offset_past_the_end(folder: Path) -> Attack:
    return _external(folder, "own.bin", offset=20)


@attack
def external_offset_negative(folder: Path) -> Attack:
    return _external(folder, "own.bin", offset=-8)


@attack
def external_length_overflows(folder: Path) -> Attack:
    return _external(folder, "own.bin", offset=(1 << 64) - 8, length=1 << 64)


@attack
def external_offset_of_many_digits(folder: Path) -> Attack:
    return _external(folder, "own.bin", offset="9" * 100_000)


@attack
def external_terabytes(folder: Path) -> Attack:
    """A sparse file as large as it says would be read into memory."""
    made = _external(folder, "w.bin", length=GIANT * 4, dims=(GIANT,))
    with (made.path.parent / "w.bin").open("wb") as file:
        file.truncate(GIANT * 4)
    return made


@attack
def external_location_of_zero_bytes(folder: Path) -> Attack:
    return _external(folder, "own.bin\0../secret.bin")


# --- sizes ------------------------------------------------------------


@attack
def declared_terabytes(folder: Path) -> Attack:
    m = model([node("Identity", ["w"], ["y"])], [], ["y"], {"w": np.zeros(6, np.float32)})
    m.graph.initializer[0].dims[0] = GIANT
    return Attack(write(folder, m))


@attack
def declared_size_that_overflows(folder: Path) -> Attack:
    """The product of the sizes is 0 in 64 bits."""
    m = model([node("Identity", ["w"], ["y"])], [], ["y"], {"w": np.zeros(0, np.float32)})
    tensor = m.graph.initializer[0]
    tensor.ClearField("dims")
    tensor.dims.extend([1 << 32, 1 << 32])
    return Attack(write(folder, m))


@attack
def declared_input_of_terabytes(folder: Path) -> Attack:
    m = model([node("Relu", ["x"], ["y"])], [value("x", [GIANT, GIANT])], ["y"])
    return Attack(write(folder, m), (X,))


@attack
def no_elements_but_giants(folder: Path) -> Attack:
    """No elements, but sizes whose product overflows."""
    m = model([node("Relu", ["w"], ["y"])], [], ["y"], {"w": np.zeros((0, 1), np.float32)})
    tensor = m.graph.initializer[0]
    tensor.ClearField("dims")
    tensor.dims.extend([0, 1 << 62, 1 << 62])
    return Attack(write(folder, m))


BOMBS: dict[str, tuple[list[NodeProto], dict[str, np.ndarray]]] = {
    "constant_of_shape": ([node("ConstantOfShape", ["big"], ["b"])], {"big": ints(GIANT)}),
    "expand": ([node("Expand", ["one", "big"], ["b"])], {"one": np.ones(1, np.float32), "big": ints(GIANT, 8)}),
    "tile": ([node("Tile", ["one", "big"], ["b"])], {"one": np.ones(1, np.float32), "big": ints(GIANT)}),
    "pad": ([node("Pad", ["one", "big"], ["b"])], {"one": np.ones(1, np.float32), "big": ints(0, GIANT)}),
    "range": (
        [node("Range", ["a", "z", "d"], ["r"]), node("Cast", ["r"], ["b"], to=TensorProto.FLOAT)],
        {"a": np.array(0), "z": np.array(GIANT), "d": np.array(1)},
    ),
    "one_hot": (
        [node("OneHot", ["i", "n", "v"], ["b"])],
        {"i": ints(0, 1), "n": np.array(GIANT), "v": np.array([0, 1], np.float32)},
    ),
    "resize": (
        [node("Resize", ["one4", "", "", "big"], ["b"])],
        {"one4": np.ones((1, 1, 2, 2), np.float32), "big": ints(1, 1, GIANT, 8)},
    ),
    "upsample": (
        [node("Resize", ["one4", "", "s"], ["b"])],
        {"one4": np.ones((1, 1, 2, 2), np.float32), "s": np.array([1, 1, 1e12, 1e12], np.float32)},
    ),
    "eye": (
        [node("EyeLike", ["one2"], ["e"]), node("Tile", ["e", "big"], ["b"])],
        {"one2": np.ones((2, 2), np.float32), "big": ints(GIANT, 1)},
    ),
    "window": (
        [node("HannWindow", ["n"], ["b"])],
        {"n": np.array(GIANT)},
    ),
}  # fmt: skip


def _bomb(name: str) -> Callable[[Path], Attack]:
    def make(folder: Path) -> Attack:
        nodes, constants = BOMBS[name]
        return refused(
            folder, [*nodes, node("ReduceSum", ["b"], ["s"]), node("Add", ["x", "s"], ["y"])], **constants
        )

    return make


ATTACKS |= {f"bomb_{name}": _bomb(name) for name in BOMBS}


@attack
def doubling_to_terabytes(folder: Path) -> Attack:
    """Forty constants, each twice as large as the one before."""
    nodes = [node("Concat", [f"b{i}", f"b{i}"], [f"b{i + 1}"], axis=0) for i in range(40)]
    nodes += [node("ReduceSum", ["b40"], ["s"], keepdims=0), node("Add", ["x", "s"], ["y"])]
    return refused(folder, nodes, b0=np.ones(1, np.float32))


@attack
def outer_products(folder: Path) -> Attack:
    """A product of constants with 10^12 elements, summed."""
    n = 1_000_000
    nodes = [
        node("MatMul", ["a", "b"], ["m"]),
        node("ReduceSum", ["m"], ["s"], keepdims=0),
        node("Add", ["x", "s"], ["y"]),
    ]
    return refused(folder, nodes, a=np.zeros((n, 1), np.float32), b=np.zeros((1, n), np.float32))


@attack
def exponent_of_integers(folder: Path) -> Attack:
    """Host arithmetic on integers wraps as the tensors do and never grows without end."""
    nodes = [node("Mul", [f"b{i}", f"b{i}"], [f"b{i + 1}"]) for i in range(40)]
    nodes += [node("Cast", ["b40"], ["c"], to=TensorProto.FLOAT), node("Add", ["x", "c"], ["y"])]
    power = 3
    for _ in range(40):
        power = power * power % (1 << 64)
    wrapped = power - (1 << 64) if power >> 63 else power
    made = refused(folder, nodes, b0=np.array(3))
    return Attack(made.path, made.inputs, lambda: X + np.float32(wrapped))


@attack
def powers_of_sizes(folder: Path) -> Attack:
    """The same with a size that is known when the model runs."""
    nodes = [node("Size", ["x"], ["b0"])]
    nodes += [node("Mul", [f"b{i}", f"b{i}"], [f"b{i + 1}"]) for i in range(40)]
    nodes += [node("Cast", ["b40"], ["c"], to=TensorProto.FLOAT), node("Add", ["x", "c"], ["y"])]
    made = refused(folder, nodes)
    return Attack(made.path, made.inputs, lambda: X)  # 6 ** (2 ** 40) is 0 in 64 bits


@attack
def repeats_from_data(folder: Path) -> Attack:
    """A call that asks for terabytes."""
    m = model(
        [node("Tile", ["x", "n"], ["y"])], [value("x", [2, 3]), value("n", [2], TensorProto.INT64)], ["y"]
    )
    return Attack(write(folder, m), (X, ints(1 << 45, 1)))


# --- graphs ------------------------------------------------------------


@attack
def cycle(folder: Path) -> Attack:
    return refused(folder, [node("Add", ["x", "z"], ["y"]), node("Relu", ["y"], ["z"])])


@attack
def cycle_of_one(folder: Path) -> Attack:
    return refused(folder, [node("Add", ["x", "y"], ["y"])])


@attack
def function_that_calls_itself(folder: Path) -> Attack:
    own = helper.make_opsetid("own", 1)
    m = model([node("F", ["x"], ["y"], domain="own")], [value("x", [2, 3])], ["y"])
    m.opset_import.append(own)
    m.functions.append(
        helper.make_function("own", "F", ["a"], ["b"], [node("F", ["a"], ["b"], domain="own")], [own])
    )
    return Attack(write(folder, m), (X,))


@attack
def functions_that_double(folder: Path) -> Attack:
    """Sixty functions that each call the next one twice: 2^60 nodes."""
    own = helper.make_opsetid("own", 1)
    m = model([node("F0", ["x"], ["y"], domain="own")], [value("x", [2, 3])], ["y"])
    m.opset_import.append(own)
    for i in range(60):
        nodes = [node(f"F{i + 1}", ["a"], ["m"], domain="own"), node(f"F{i + 1}", ["m"], ["b"], domain="own")]
        m.functions.append(helper.make_function("own", f"F{i}", ["a"], ["b"], nodes, [own]))
    relu = [node("Relu", ["a"], ["b"])]
    m.functions.append(
        helper.make_function("own", "F60", ["a"], ["b"], relu, [own, helper.make_opsetid("", 17)])
    )
    return Attack(write(folder, m), (X,))


@attack
def branches_that_double(folder: Path) -> Attack:
    """Branches within branches: 2^11 of them."""
    m = model([], [value("x", [2, 3])], ["y"])
    leaf = body([node("Relu", ["x"], ["r"])], [], ["r"])
    for level in range(10):
        leaf = body([node("If", ["c"], [f"r{level}"], then_branch=leaf, else_branch=leaf)], [], [f"r{level}"])
    m.graph.input.append(value("c", [], TensorProto.BOOL))
    m.graph.node.append(node("If", ["c"], ["y"], then_branch=leaf, else_branch=leaf))
    return Attack(write(folder, m), (X, np.array(True)), lambda: np.maximum(X, 0))


@attack
def chain_of_100000(folder: Path) -> Attack:
    """Longer than anything that recurses, or compares all pairs, comes through."""
    n = 100_000
    nodes = [node("Add", [f"v{i}", "c"], [f"v{i + 1}"]) for i in range(n)]
    m = model(nodes, [value("v0", [2, 3])], [f"v{n}"], {"c": np.ones(3, np.float32)})
    return Attack(write(folder, m), (X,), lambda: X + n)


@attack
def chain_of_100000_constants(folder: Path) -> Attack:
    n = 100_000
    nodes = [node("Add", [f"v{i}", "v0"], [f"v{i + 1}"]) for i in range(n)]
    m = model(
        [*nodes, node("Add", ["x", f"v{n}"], ["y"])],
        [value("x", [2, 3])],
        ["y"],
        {"v0": np.ones(3, np.float32)},
    )
    return Attack(write(folder, m), (X,), lambda: X + n + 1)


@attack
def chain_of_100000_sizes(folder: Path) -> Attack:
    """Host arithmetic on a size that is not known when the file is read."""
    n = 100_000
    nodes = [node("Size", ["x"], ["v0"]), *[node("Add", [f"v{i}", "one"], [f"v{i + 1}"]) for i in range(n)]]
    nodes += [node("Cast", [f"v{n}"], ["c"], to=1), node("Add", ["x", "c"], ["y"])]
    m = model(nodes, [value("x", ["n", 3])], ["y"], {"one": np.array(1)})
    return Attack(write(folder, m), (X,), lambda: X + 6 + n)


@attack
def inputs_by_the_thousand(folder: Path) -> Attack:
    n = 2_000
    nodes = [node("Sum", [f"x{i}" for i in range(n)], ["y"])]
    return Attack(
        write(folder, model(nodes, [value(f"x{i}", [2, 3]) for i in range(n)], ["y"])),
        (X,) * n,
        lambda: X * n,
    )


@attack
def loop_without_end(folder: Path) -> Attack:
    """A trip count of 2^62 whose condition stays true; its result is a scan of 2^62 rows."""
    inside = body(
        [node("Identity", ["c"], ["d"]), node("Relu", ["v"], ["w"]), node("Identity", ["v"], ["s"])],
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("v", [2, 3])],
        [value("d", [], TensorProto.BOOL), value("w", [2, 3]), value("s", [2, 3])],
    )
    nodes = [node("Loop", ["n", "", "x"], ["z", "y"], body=inside)]
    return refused(folder, nodes, n=np.array(1 << 62))


# --- files ------------------------------------------------------------


def _raw(folder: Path, data: bytes) -> Attack:
    made = refused(folder, [node("Relu", ["x"], ["y"])])
    made.path.write_bytes(data)
    return made


@attack
def empty_file(folder: Path) -> Attack:
    return _raw(folder, b"")


@attack
def garbage(folder: Path) -> Attack:
    return _raw(folder, bytes(np.random.default_rng(0).integers(0, 256, 4096, np.uint8)))


@attack
def half_a_file(folder: Path) -> Attack:
    made = refused(folder, [node("Add", ["x", "w"], ["y"])], w=np.ones((2, 3), np.float32))
    made.path.write_bytes(made.path.read_bytes()[:-9])
    return made


@attack
def length_prefix_of_terabytes(folder: Path) -> Attack:
    """Field 7 (the graph) says that it is 2^62 bytes long."""
    return _raw(folder, b"\x3a" + b"\xff\xff\xff\xff\xff\xff\xff\xff\x3f")


@attack
def messages_within_messages(folder: Path) -> Attack:
    """Graphs in attributes of nodes of graphs, ten thousand deep."""
    data = b""
    for _ in range(10_000):
        for tag in (0x32, 0x2A, 0x0A):  # attribute.g, node.attribute, graph.node
            data = bytes([tag]) + _varint(len(data)) + data
    return _raw(folder, b"\x3a" + _varint(len(data)) + data + b"\x42\x02\x10\x11")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


@attack
def name_that_is_no_text(folder: Path) -> Attack:
    made = refused(folder, [node("Relu", ["x"], ["yyyy"])])
    made.path.write_bytes(made.path.read_bytes().replace(b"yyyy", b"\xff\xfe\xfd\xfc"))
    return made


@attack
def pipe_as_model(folder: Path) -> Attack:
    """The model itself is a pipe that nobody writes to."""
    made = refused(folder, [node("Relu", ["x"], ["y"])])
    made.path.unlink()
    os.mkfifo(made.path)
    return made


@attack
def device_as_model(folder: Path) -> Attack:
    """Zeros without end, by a link that the user himself gives."""
    made = refused(folder, [node("Relu", ["x"], ["y"])])
    made.path.unlink()
    made.path.symlink_to("/dev/zero")
    return made


@attack
def terabytes_as_model(folder: Path) -> Attack:
    made = refused(folder, [node("Relu", ["x"], ["y"])])
    with made.path.open("wb") as file:
        file.truncate(GIANT)
    return made


@attack
def bytes_of_a_name_that_is_no_text(folder: Path) -> Attack:
    made = refused(folder, [node("Relu", ["x"], ["y"], name="yyyy")])
    made.path.write_bytes(made.path.read_bytes().replace(b"yyyy", b"\xff\xfe\xfd\xfc"))
    return made


# --- attributes ------------------------------------------------------------


def _with(
    op: str, name: str, content: object, inputs: Sequence[str] = ("x",), **constants: np.ndarray
) -> Callable[[Path], Attack]:
    def make(folder: Path) -> Attack:
        return refused(folder, [node(op, inputs, ["y"], **{name: content})], **constants)

    return make


ATTACKS |= {
    "attribute_text_for_a_number": _with("Softmax", "axis", "1"),
    "attribute_float_for_a_number": _with("Softmax", "axis", 1.5),
    "attribute_list_for_a_number": _with("Concat", "axis", [0, 1]),
    "attribute_number_for_a_list": _with("Transpose", "perm", 1),
    "attribute_axis_far_out": _with("Softmax", "axis", 1 << 62),
    "attribute_perm_far_out": _with("Transpose", "perm", [0, -(1 << 62)]),
    "attribute_graph_for_a_number": _with("Softmax", "axis", body([], [], [])),
    "attribute_tensor_for_a_number": _with("Cast", "to", helper.make_tensor("t", TensorProto.INT64, [1], [1])),
    "attribute_type_of_number_99": _with("Cast", "to", 99),
    "attribute_type_negative": _with("Cast", "to", -(1 << 62)),
    "attribute_kernel_of_giants": _with("MaxPool", "kernel_shape", [1 << 40, 1 << 40], ("w",), w=IMAGE),
    "attribute_pads_of_giants": _with("AveragePool", "pads", [1 << 40] * 4, ("w",), w=IMAGE),
    "attribute_group_of_zero": _with("Conv", "group", 0, ("w", "w"), w=IMAGE),
    "attribute_block_of_zero": _with("DepthToSpace", "blocksize", 0, ("w",), w=np.ones((1, 4, 2, 2), np.float32)),
}  # fmt: skip


@attack
def gather_out_of_range(folder: Path) -> Attack:
    nodes = [node("Gather", ["x", "i"], ["y"])]
    return refused(folder, nodes, i=ints(1 << 40))


@attack
def reshape_to_nowhere(folder: Path) -> Attack:
    return refused(folder, [node("Reshape", ["x", "s"], ["y"])], s=ints(-1, -1))


@attack
def division_by_zero(folder: Path) -> Attack:
    nodes = [node("Div", ["a", "b"], ["c"]), node("Cast", ["c"], ["d"], to=1), node("Add", ["x", "d"], ["y"])]
    return refused(folder, nodes, a=np.array(-(2**63)), b=np.array(0))


@attack
def duplicate_names(folder: Path) -> Attack:
    return refused(folder, [node("Relu", ["x"], ["y"]), node("Tanh", ["x"], ["y"])])
