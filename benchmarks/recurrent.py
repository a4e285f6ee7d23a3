"""`python -m benchmarks.recurrent`: recurrent ONNX models over onnxruntime on the CPU, and their time to compile.

Weights are random, the models are made here: recurrent layers of several sizes, a voice-activity model (convolutions, a
layer of 128 units, one sample), a cell written out in a `Loop` of 80 steps and in a `Scan`, and a greedy decoder whose
end depends on its data. Caches begin empty, but for our own routines, which a machine builds once.

Both runtimes take turns. Before each sample there is a silence (`measure.silence`) and one untimed call: threads of the
one that ran before, which spin for a while (onnxruntime's for 50 ms), are asleep by then. Both keep their own defaults
otherwise. Beside each case stands how many cores other processes used meanwhile.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import click
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.record import Facts
from tilewright import measure
from tilewright.pipeline.backends import cpu

Arrays = dict[str, np.ndarray]
Case = tuple[onnx.ModelProto, Arrays]
RNG = np.random.default_rng(0)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _normal(*shape: int, by: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) / by).astype(np.float32)


def _value(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[str],
    constants: Mapping[str, np.ndarray],
) -> onnx.ModelProto:  # fmt: skip
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", list(inputs), made, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def layer(kind: str, units: int, batch: int, steps: int, direction: str = "forward") -> Case:
    """One recurrent layer with as many inputs as units."""
    d, g = 2 if direction == "bidirectional" else 1, GATES[kind]
    constants = {
        "w": _normal(d, g * units, units, by=units**0.5),
        "r": _normal(d, g * units, units, by=units**0.5),
        "b": _normal(d, 2 * g * units, by=3),
    }
    node = helper.make_node(kind, ["x", "w", "r", "b"], ["y", "yh"], hidden_size=units, direction=direction)
    model = _model([node], [_value("x", ["steps", batch, units])], ["y", "yh"], constants)
    return model, {"x": _normal(steps, batch, units)}


def voice() -> Case:
    """Convolutions over a window of sound, a layer of 128 units with its state outside, a probability."""
    constants = {
        "k1": _normal(64, 1, 16, by=4), "k2": _normal(128, 64, 3, by=14), "k3": _normal(128, 128, 3, by=20),
        "w": _normal(1, 512, 128, by=11), "r": _normal(1, 512, 128, by=11), "b": _normal(1, 1024, by=3),
        "k4": _normal(1, 128, 1, by=11),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "k1"], ["a1"], strides=[8]),
        helper.make_node("Relu", ["a1"], ["b1"]),
        helper.make_node("Conv", ["b1", "k2"], ["a2"], strides=[2], pads=[1, 1]),
        helper.make_node("Relu", ["a2"], ["b2"]),
        helper.make_node("Conv", ["b2", "k3"], ["a3"], strides=[2], pads=[1, 1]),
        helper.make_node("Relu", ["a3"], ["b3"]),
        helper.make_node("Transpose", ["b3"], ["t"], perm=[2, 0, 1]),
        helper.make_node("LSTM", ["t", "w", "r", "b", "", "h", "c"], ["", "hn", "cn"], hidden_size=128),
        helper.make_node("Transpose", ["hn"], ["u"], perm=[1, 2, 0]),
        helper.make_node("Relu", ["u"], ["v"]),
        helper.make_node("Conv", ["v", "k4"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["p"]),
    ]
    inputs = [_value("x", [1, 1, 576]), _value("h", [1, 1, 128]), _value("c", [1, 1, 128])]
    return _model(nodes, inputs, ["p", "hn", "cn"], constants), {
        "x": _normal(1, 1, 576), "h": _normal(1, 1, 128), "c": _normal(1, 1, 128)
    }  # fmt: skip


def _cell(units: int) -> tuple[list[onnx.NodeProto], Arrays]:
    """h2 and c2 of an LSTM cell over the row `xt`, h and c, written out."""
    make = helper.make_node
    nodes = [
        make("Concat", ["xt", "h"], ["xh"], axis=1), make("MatMul", ["xh", "w"], ["m"]), make("Add", ["m", "b"], ["g"]),
        make("Split", ["g"], ["gi", "gf", "go", "gn"], axis=1), make("Sigmoid", ["gi"], ["i"]),
        make("Sigmoid", ["gf"], ["f"]), make("Sigmoid", ["go"], ["o"]), make("Tanh", ["gn"], ["new"]),
        make("Mul", ["f", "c"], ["fc"]), make("Mul", ["i", "new"], ["in"]), make("Add", ["fc", "in"], ["c2"]),
        make("Tanh", ["c2"], ["tc"]), make("Mul", ["o", "tc"], ["h2"]),
    ]  # fmt: skip
    return nodes, {"w": _normal(2 * units, 4 * units, by=units**0.5), "b": _normal(4 * units)}


def loop(units: int, batch: int, steps: int) -> Case:
    """The cell in a `Loop` that takes row after row of x."""
    nodes, constants = _cell(units)
    make, row = helper.make_node, [batch, units]
    body = helper.make_graph(
        [make("Gather", ["x", "t"], ["xt"], axis=0), *nodes, make("Identity", ["go_on"], ["goes"]),
         make("Identity", ["h2"], ["each"])],
        "body",
        [_value("t", [], TensorProto.INT64), _value("go_on", [], TensorProto.BOOL), _value("h", row), _value("c", row)],
        [_value("goes", [], TensorProto.BOOL), _value("h2", row), _value("c2", row), _value("each", row)],
    )  # fmt: skip
    outer = [
        make("Shape", ["x"], ["size"], start=0, end=1),
        make("Squeeze", ["size"], ["n"]),
        make("Loop", ["n", "", "h0", "c0"], ["hn", "cn", "y"], body=body),
    ]
    inputs = [_value("x", ["steps", *row]), _value("h0", row), _value("c0", row)]
    given = {"x": _normal(steps, batch, units), "h0": _normal(batch, units), "c0": _normal(batch, units)}
    return _model(outer, inputs, ["y", "hn", "cn"], constants), given


def scan(units: int, batch: int, steps: int) -> Case:
    """The cell in a `Scan`."""
    nodes, constants = _cell(units)
    make, row = helper.make_node, [batch, units]
    body = helper.make_graph(
        [*nodes, make("Identity", ["h2"], ["each"])],
        "body",
        [_value("h", row), _value("c", row), _value("xt", row)],
        [_value("h2", row), _value("c2", row), _value("each", row)],
    )
    outer = [make("Scan", ["h0", "c0", "x"], ["hn", "cn", "y"], num_scan_inputs=1, body=body)]
    inputs = [_value("x", ["steps", *row]), _value("h0", row), _value("c0", row)]
    given = {"x": _normal(steps, batch, units), "h0": _normal(batch, units), "c0": _normal(batch, units)}
    return _model(outer, inputs, ["y", "hn", "cn"], constants), given


def decoder(units: int, words: int, most: int) -> Case:
    """Greedy decoding: the likeliest word is what the next step reads, until it is word 0 or there are `most`."""
    nodes, constants = _cell(units)
    constants |= {
        "embedding": _normal(words, units), "head": _normal(units, words, by=units**0.5),
        "end": np.array([0], np.int64), "most": np.array(most, np.int64), "first": np.array([1], np.int64),
    }  # fmt: skip
    make, row, ids = helper.make_node, [1, units], TensorProto.INT64
    body = helper.make_graph(
        [make("Gather", ["embedding", "word"], ["xt"], axis=0), *nodes, make("MatMul", ["h2", "head"], ["scores"]),
         make("ArgMax", ["scores"], ["next"], axis=1, keepdims=0), make("Equal", ["next", "end"], ["ended"]),
         make("Not", ["ended"], ["on"]), make("Squeeze", ["on"], ["goes"]), make("Identity", ["next"], ["each"])],
        "body",
        [_value("t", [], ids), _value("go_on", [], TensorProto.BOOL), _value("word", [1], ids), _value("h", row),
         _value("c", row)],
        [_value("goes", [], TensorProto.BOOL), _value("next", [1], ids), _value("h2", row), _value("c2", row),
         _value("each", [1], ids)],
    )  # fmt: skip
    outer = [make("Loop", ["most", "", "first", "h0", "c0"], ["word_n", "hn", "cn", "said"], body=body)]
    given = {"h0": _normal(1, units), "c0": _normal(1, units)}
    return _model(outer, [_value("h0", row), _value("c0", row)], ["said", "hn"], constants), given


CASES: dict[str, Callable[[], Case]] = {
    "lstm 128, batch 1, 80 steps": lambda: layer("LSTM", 128, 1, 80),
    "lstm 64, batch 8, 100 steps": lambda: layer("LSTM", 64, 8, 100),
    "lstm 256, batch 32, 50 steps": lambda: layer("LSTM", 256, 32, 50),
    "lstm 128, both ways, batch 4, 200 steps": lambda: layer("LSTM", 128, 4, 200, "bidirectional"),
    "gru 128, batch 1, 80 steps": lambda: layer("GRU", 128, 1, 80),
    "gru 256, batch 16, 60 steps": lambda: layer("GRU", 256, 16, 60),
    "rnn 128, batch 8, 100 steps": lambda: layer("RNN", 128, 8, 100),
    "voice activity": voice,
    "loop of a cell, 128, batch 1, 80 steps": lambda: loop(128, 1, 80),
    "loop of a cell, 64, batch 8, 640 steps": lambda: loop(64, 8, 640),
    "scan of a cell, 128, batch 4, 200 steps": lambda: scan(128, 4, 200),
    "decoder, 128, 1000 words, at most 100": lambda: decoder(128, 1000, 100),
}


def _others() -> float:
    """Seconds that cores have worked for other processes than this one (Linux; elsewhere 0)."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, *rest = (int(n) for n in first.split()[1:9])
    own = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def run(case: Case, threads: int, seconds: float, *, shared: bool = False) -> Facts:
    """Seconds to compile, medians of both in ms, how much faster ours is, and the largest difference of the results;
    with `shared`, also the median where threads share out each step instead of taking rows."""
    import onnxruntime

    import tilewright

    proto, arrays = case
    with tempfile.TemporaryDirectory() as folder, measure.settings(threads):
        path = Path(folder) / "model.onnx"
        onnx.save(proto, str(path))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        began = time.perf_counter()
        model = tilewright.compile(path)
        have = model(**tensors)
        compiled = time.perf_counter() - began
        want = session.run(None, arrays)
        results = have if isinstance(have, tuple) else (have,)
        worst = max(float(np.abs(np.asarray(h) - w).max()) for h, w in zip(results, want, strict=True))
        calls: dict[str, Callable[[], object]] = {
            "tilewright": lambda: model(**tensors), "onnxruntime": lambda: session.run(None, arrays)
        }  # fmt: skip
        if shared:
            with mock.patch.object(cpu, "parts_for", lambda *_: 1):
                stepwise = tilewright.compile(path)
                stepwise(**tensors)
            calls["steps shared"] = lambda: stepwise(**tensors)
        start, before = time.perf_counter(), _others()
        timings = measure.measure(calls, seconds=seconds)
        others = (_others() - before) / (time.perf_counter() - start)
    times = {name: timing.median * 1e3 for name, timing in timings.items()}
    return {
        "compile_s": compiled, "median_ms": times, "speedup": times["onnxruntime"] / times["tilewright"],
        "difference": worst, "others_cores": others, "coverage": str(model.coverage),
    }  # fmt: skip


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all figures there"
)
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="timing per contestant")
@click.option("--only", default="", help="cases whose name has this in it")
@click.option("--shared", is_flag=True, help="also time threads that share out each step")
@click.option("--add", is_flag=True, help="keep the other cases of the file, which are of the same commit")
def main(path: Path | None, threads: int, seconds: float, only: str, shared: bool, add: bool) -> None:
    """Run all cases and print one table."""
    warnings.filterwarnings("ignore")
    table = Table(title="recurrent models", title_justify="left")
    for column in ("case", "compile s", "tilewright ms", "onnxruntime ms", "speedup", "difference", "others"):
        table.add_column(column, justify="left" if column == "case" else "right")
    found: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE_DIR"] = cache
        run(layer("LSTM", 16, 1, 8), threads, 0.01)  # builds our own routines
        for name, make in CASES.items():
            if only not in name:
                continue
            facts = found[name] = run(make(), threads, seconds, shared=shared)
            each: Mapping[str, float] = facts["median_ms"]  # type: ignore[assignment]
            table.add_row(
                name, f"{facts['compile_s']:.1f}", f"{each['tilewright']:.3f}", f"{each['onnxruntime']:.3f}",
                f"{facts['speedup']:.2f}", f"{facts['difference']:.1e}",
                f"{facts['others_cores']:.2f}",
            )  # fmt: skip
    Console(width=140).print(table)
    if path is not None:
        made = record.provenance(threads)
        if add and path.exists():
            before = json.loads(path.read_text())
            if before["commit"] != made["commit"]:
                raise click.ClickException(f"{path} is of {before['commit']}")
            found = {name: c for name in CASES if (c := found.get(name, before["cases"].get(name)))}
        record.write_json(path, {**made, "cases": found})


if __name__ == "__main__":
    main()
