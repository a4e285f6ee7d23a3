"""Verbs of the command line over the real compiler: what they print adds up, and says what it should."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from click.testing import CliRunner, Result

import tilewright
from tilewright import measure
from tilewright.cli import explain
from tilewright.cli.command import cli
from tilewright.cli.explain import early_launch_text
from tilewright.plan.boundary import Boundary
from tilewright.runtime.cuda import triton_compat
from tilewright.target import preset

NET = """
import torch
def make():
    f = lambda x, y: torch.softmax(x * y, -1).cumsum(0)
    return f, (torch.randn(8, 32), torch.randn(8, 32))
def alike():
    return lambda *xs: [x.cumsum(0) for x in xs], tuple(torch.randn(50000) for _ in range(5))
def product():
    return torch.nn.Linear(32, 32), (torch.randn(4, 32),)
def shifted():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU()).eval(), (torch.randn(4, 8),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, as the current one, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "verbs_net", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "verbs_net.py").write_text(NET)
    tilewright.reset()  # what another test made dynamic is so for equal code
    return tmp_path


def write_model(path: Path, shape: list[str | int], target: list[int]) -> None:
    """A file whose input of this shape is given another one."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, target)
    to = onnx.helper.make_tensor("to", onnx.TensorProto.INT64, [len(target)], target)
    nodes = [
        onnx.helper.make_node("Reshape", ["x", "to"], ["r"]),
        onnx.helper.make_node("Relu", ["r"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [to])
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(file, str(path))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def told(*arguments: str) -> dict[str, object]:
    """The JSON of a verb that succeeds."""
    result = invoke(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_phases_explain_the_time_of_the_process(here: Path) -> None:
    """In a process of its own, whose clock starts where it starts."""
    command = [sys.executable, "-m", "tilewright", "compile", "verbs_net:make", "--json", "out.json", "-q"]
    paths = ":".join(p for p in sys.path if p)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "TILEWRIGHT_CACHE_DIR": "cache"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == ""
    facts = json.loads((here / "out.json").read_text())
    phases = {phase["name"]: phase["seconds"] for phase in facts["phases"]}
    assert {"start", "imports", "trace", "build", "load", "install", "first run"} <= phases.keys()
    assert sum(phases.values()) / facts["seconds"] > 0.97
    assert all(seconds >= 0 for seconds in phases.values())


def test_bench_and_compile_name_the_same_phases(here: Path) -> None:
    compiled = told("compile", "verbs_net:make")
    timed = told("bench", "verbs_net:make", "--against", "none", "--seconds", "0.05")
    names = [[p["name"] for p in facts["phases"]] for facts in (compiled, timed)]  # type: ignore[attr-defined]
    assert [n for n in names[0] if n in names[1]] == names[1]
    (ours,) = timed["contestants"]  # type: ignore[misc]
    assert timed["seconds"] == pytest.approx(ours["build_seconds"] + ours["first_call_seconds"])


def test_explain_shows_all_in_order_with_a_reason_and_a_share(here: Path) -> None:
    facts = told(
        "explain", "verbs_net:make", "--time", "--dim", "x:0=rows[2..64]", "--dim", "y:0=rows[2..64]"
    )
    steps = facts["steps"]
    assert [s["ops"] for s in steps] == [["aten.mul", "aten._softmax"], ["aten.cumsum"]]  # type: ignore[attr-defined, union-attr]
    assert sum(s["share"] for s in steps) == pytest.approx(1)  # type: ignore[attr-defined, union-attr]
    assert all(s["boundary"] in {b.value for b in Boundary} and s["measured_us"] > 0 for s in steps)  # type: ignore[attr-defined, union-attr]
    assert list(facts["figures_for"].values()) == [8]  # type: ignore[attr-defined]


def test_explain_names_kernels_that_are_one_launch(here: Path) -> None:
    assert told("explain", "verbs_net:alike")["lists"] == [{"kernel": "k0", "rows": 5}]
    assert "one launch each: k0 x5" in invoke("explain", "verbs_net:alike").output
    facts = told("explain", "verbs_net:alike", "--time")
    assert all(s["measured_us"] > 0 for s in facts["steps"]), "each is timed by itself"  # type: ignore[attr-defined]


def test_explain_says_how_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, older = preset("sm_90"), preset("sm_80")
    assert early_launch_text(hopper, "none") == early_launch_text(None, "own") == ""
    assert early_launch_text(preset("x86-64"), "own") == ""
    assert "early behind a generated one" in early_launch_text(hopper, "own")
    assert "early behind any kernel" in early_launch_text(hopper, "any")
    assert "in stream order: sm_80" in early_launch_text(older, "own")
    with monkeypatch.context() as old:
        gpu = SimpleNamespace(driver=SimpleNamespace(launches_early=False))
        old.setattr(explain, "opened", lambda: (gpu,))
        assert early_launch_text(hopper, "own").endswith("the driver is older than CUDA 12.3")
    monkeypatch.setattr(triton_compat, "can_wait", lambda: False)
    assert "in stream order: Triton" in early_launch_text(hopper, "any")


def test_explain_names_the_slowest_and_what_it_waits_for(here: Path) -> None:
    facts = told("explain", "verbs_net:make", "--time")
    assert {s["bound_by"] for s in facts["steps"]} <= {"memory", "arithmetic", "exponentials", "its start"}  # type: ignore[attr-defined, union-attr]
    (slowest,) = facts["slowest"]  # type: ignore[misc]
    assert slowest.startswith("slowest: #") and "of all; bound by" in slowest and "ends there as" in slowest


def test_an_artifact_is_a_model_to_every_verb_that_tells_of_one(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert invoke("compile", "verbs_net:shifted", "-o", "kept.tw").exit_code == 0
    assert told("explain", "kept.tw")["steps"][0]["bound_by"]  # type: ignore[index]
    assert told("report", "kept.tw", "--no-time")["report"]["graphs"][0]["machine"]  # type: ignore[index]
    timed = told("bench", "kept.tw", "--against", "onnxruntime", "--seconds", "0.02")
    assert "onnxruntime" in timed["not_available"]  # type: ignore[operator]
    assert "IR graph" not in capfd.readouterr().out, "torch's exporter prints what it fails on"


def test_an_option_of_a_wrong_value_is_named_as_it_was_given(here: Path) -> None:
    assert "(at --option fusion)" in invoke("run", "verbs_net:make", "--option", "fusion=all").output


def test_source_has_no_stray_characters(here: Path) -> None:
    result = invoke("explain", "verbs_net:make", "--source")
    assert "\n// k0\n" in result.output and "\ufffd" not in result.output
    assert "figures are for" not in result.output, "there is no free size"


def test_inspect_builds_nothing(here: Path) -> None:
    facts = told("inspect", "verbs_net:product", "--dim", "input:0=rows[2..9]")
    assert facts["inputs"] == [{"name": "input", "type": "float32", "shape": ["rows", 32]}]
    assert facts["outputs"] == [{"name": "output0", "type": "float32", "shape": ["rows", 32]}]
    assert facts["dims"] == [{"name": "rows", "places": [["input", 0]], "low": 2, "high": 9}]
    assert facts["ops"] == [
        {
            "op": "aten.addmm",
            "count": 1,
            "generated": 0,
            "called": {"as a library call by choice (contraction)": 1},
        }
    ]
    assert facts["weight_bytes"] == 4 * (32 * 32 + 32)
    assert not list(here.glob("cache/kernels/*/*/unit.so"))


def test_sizes_that_we_chose_and_that_do_not_fit_are_named_with_some_that_do(here: Path) -> None:
    write_model(here / "m.onnx", ["n", "length"], [2, 3, 16])
    result = invoke("run", "m.onnx")
    assert result.exit_code == 2 and "the sizes that we chose do not fit the model: x=2x64 (" in result.output
    assert "these fit: --shape x=1x96" in result.output
    assert invoke("run", "m.onnx", "--shape", "x=1x96", "-q").output == ""


def test_ranges_bound_the_sizes_that_we_choose(here: Path) -> None:
    write_model(here / "m.onnx", ["n", 3], [-1])
    facts = told("run", "m.onnx", "--dim", "x:0=n[5..9]")
    assert facts["sizes"] == {"x": [5, 3]} and facts["sizes_from"] == "chosen; --shape takes others"


def test_a_type_and_a_precision_reach_the_model(here: Path) -> None:
    facts = told("inspect", "verbs_net:product", "--precision", "bf16")
    assert facts["inputs"][0]["type"] == facts["outputs"][0]["type"] == "bfloat16"  # type: ignore[index]
    facts = told("inspect", "verbs_net:make", "--dtype", "x=fp64")
    assert [entry["type"] for entry in facts["inputs"]] == ["float64", "float32"]  # type: ignore[attr-defined, index, union-attr]


@pytest.mark.filterwarnings("default")
def test_warnings_are_lines_without_source(here: Path) -> None:
    (here / "verbs_net.py").write_text(
        "import warnings\n"
        + NET
        + "def warns():\n    warnings.warn('beware', stacklevel=1)\n    return make()\n"
    )
    result = invoke("inspect", "verbs_net:warns", "--json", "out.json")
    assert "warning: beware\n" in result.output and "warnings.warn" not in result.output
    assert json.loads((here / "out.json").read_text())["warnings"] == ["beware"]


def test_what_torch_cannot_trace_is_one_line(here: Path) -> None:
    result = invoke("compile", "verbs_net:make", "--shape", "x=4x4")
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_env_says_what_code_is_made_with(here: Path) -> None:
    facts = told("env")["environment"]
    assert facts["torch"] == torch.__version__ and facts["cache"] == str(here / "cache" / "kernels")  # type: ignore[index]
    assert {"compiler", "isa", "devices", "cache_bytes"} <= facts.keys()  # type: ignore[attr-defined]
    assert facts["variables"]["TILEWRIGHT_CACHE_DIR"] == str(here / "cache")  # type: ignore[index]


def test_the_cache_is_listed_verified_and_cleared(here: Path) -> None:
    invoke("compile", "verbs_net:make", "-q")
    (here / "cache" / "kernels" / "ab").mkdir(exist_ok=True)
    (here / "cache" / "kernels" / "ab" / "mine.txt").write_text("no entry")
    listed = told("cache", "list")
    assert listed["entries"] == len(listed["list"]) > 0  # type: ignore[arg-type]
    assert invoke("cache", "verify").output.endswith("PASS: all whole\n")
    library = next(here.glob("cache/kernels/*/*/unit.so"))
    library.write_bytes(b"broken")
    result = invoke("cache", "verify")
    assert result.exit_code == 4 and str(library.parent) in result.output.replace("\n", "")
    assert invoke("cache", "clear").exit_code == 0 and told("cache")["entries"] == 0
    assert (here / "cache" / "kernels" / "ab" / "mine.txt").exists(), "what is not ours stays"


def test_a_cache_that_nobody_may_read_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(root: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(root))

    monkeypatch.setattr("tilewright.cli.machine.entries", refused)
    for action in ("size", "verify", "clear"):
        result = invoke("cache", action)
        assert result.exit_code == 2 and "CACHE_DIR" in result.output
        assert "the cache cannot be read: Permission denied" in result.output
    assert "cannot be read" in str(told("env")["environment"])


def test_a_cache_that_is_off_has_no_verbs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    assert invoke("cache").exit_code == 2 and invoke("env").exit_code == 0


@pytest.mark.parametrize("name", list(cli.commands))
def test_every_help_has_examples(name: str) -> None:
    text = invoke(name, "--help").output
    assert f"  tilewright {name} " in text.partition("Examples:")[2] or f"  tilewright {name}\n" in text


def test_report_writes_a_page_and_compares_with_an_earlier_run(here: Path) -> None:
    facts = told("report", "verbs_net:make", "-o", "first.html")
    (graph,) = facts["report"]["graphs"]  # type: ignore[index]
    assert [s["name"] for s in graph["steps"]] == ["k0", "k1"] and all(
        s["measured"] > 0 for s in graph["steps"]
    )
    (here / "before.json").write_text(json.dumps(facts))
    again = invoke("report", "before.json", "--against", "before.json", "-o", "second.html")
    assert again.exit_code == 0 and "report of 2 kernels and calls: second.html" in again.output
    first, second = ((here / name).read_text() for name in ("first.html", "second.html"))
    assert "verbs_net:make" in first and "Against verbs_net:make" not in first
    assert "Against verbs_net:make" in second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", "verbs_net:make", "-o", "absent/page.html"), "cannot be written there"),
        (("report", "verbs_net:make", "--against", "absent.json"), "cannot read a report"),
        (("report", "absent.json"), "cannot read a report"),
        (("bench", "verbs_net:make", "--html", "."), "cannot be written there"),
        (("bench", "verbs_net:make", "--over", "batch"), "not sizes of a dim"),
        (("bench", "verbs_net:make", "--over", "batch=0"), "not sizes of a dim"),
        (("bench", "verbs_net:make", "--over", "batch=2"), "no input has a dim 'batch'"),
    ],
)
def test_pages_that_cannot_be_are_refused_before_the_work(
    here: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0 and words in " ".join(result.stderr.split())
    assert "generated" not in result.output


def test_bench_writes_pages_with_throughput_over_sizes(here: Path) -> None:
    dims = ("--dim", "x:0=rows", "--dim", "y:0=rows", "--over", "rows=4,2")
    pages = ("--html", "bench.html", "--md", "bench.md")
    facts = told("bench", "verbs_net:make", "--against", "none", "--seconds", "0.02", *dims, *pages)
    assert list(facts["over"]["rates"]["tilewright"]) == ["2", "4"]  # type: ignore[index]
    assert "Throughput over rows" in (here / "bench.html").read_text()
    assert "| rows | tilewright |" in (here / "bench.md").read_text()


def test_a_saved_program_is_a_model(here: Path) -> None:
    """`inspect` compiles nothing of it, though it is compiled before it is called."""
    program = torch.export.export(torch.nn.Linear(8, 4), (torch.ones(2, 8),))
    torch.export.save(program, here / "m.pt2")
    assert "would generate" in invoke("inspect", "m.pt2").output
    assert "2x4" in invoke("run", "m.pt2").output
    (here / "bad.pt2").write_bytes(b"PK")
    failed = invoke("run", "bad.pt2")
    assert failed.exit_code == 2 and "torch cannot load this program" in failed.output


@pytest.mark.parametrize("when", ["building", "timing", "over sizes"])
def test_an_interrupted_bench_shows_and_writes_what_it_has(
    here: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    usual, calls = measure.measure, [0]

    def stops(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    def timed(runs: dict[str, measure.Run], **given: object) -> object:
        calls[0] += 1
        found = usual(runs, **given)  # type: ignore[arg-type]
        if when == "timing" or calls[0] > 2:
            raise measure.Interrupted(found)
        return found

    monkeypatch.setattr(measure, "measure", timed)
    if when == "building":
        monkeypatch.setattr(measure, "PEERS", {**measure.PEERS, "inductor": stops})
    dims = ("--dim", "x:0=rows", "--dim", "y:0=rows", "--over", "rows=4,2") if when == "over sizes" else ()
    against = ("--against", "eager,inductor" if when == "building" else "eager", "--seconds", "0.02")
    result = invoke("bench", "verbs_net:make", *against, *dims, "--json", "out.json", "--md", "bench.md")
    facts = json.loads((here / "out.json").read_text())
    assert result.exit_code == facts["exit_code"] == 130 and "interrupted" in result.stderr
    assert [c["name"] for c in facts["contestants"]] == ["tilewright", "eager"]
    assert ("throughput" in facts["contestants"][0]) == (when != "building")
    assert (here / "bench.md").exists() == (when != "building")
    if when == "over sizes":
        assert list(facts["over"]["rates"]["tilewright"]) == ["2"]
