"""The command line: arguments, tables, JSON and exit codes, over a stand-in for the compiler."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from torch import Tensor, nn

from tilewright import measure, progress
from tilewright.cli import bench, model, show, sizes
from tilewright.cli.command import cli
from tilewright.cli.request import CommandRequest
from tilewright.errors import BuildError, InputError, UnsupportedError
from tilewright.options import Options
from tilewright.plan.boundary import Boundary


@dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    result: object = None


@dataclass(frozen=True)
class Kernel:
    name: str = "k0"
    ops: tuple[str, ...] = ("mul", "add[/red]")
    bytes_moved: int = 3000
    bytes_lower_bound: int = 2000
    exps: int = 10
    seconds: float = 2e-6
    flops: int = 512
    sizes: Mapping[str, int] = field(default_factory=dict)
    source: str = "void k0() {}\n"
    reason: str = "the next op reads across rows"
    boundary: Boundary = Boundary.LAW


@dataclass
class Call:
    """One call that is not a generated kernel."""

    name: str = "linear"
    ops: tuple[str, ...] = ("aten.addmm",)
    how: str = "own"
    reason: str = "contraction"
    results: tuple[str, ...] = ("f32[3, 4]",)
    bytes_moved: int = 12_345
    flops: int = 678_901
    exps: int | None = None
    seconds: float | None = 7e-6
    sizes: Mapping[str, int] = field(default_factory=dict)


class Fake:
    """What the entry point returns: runs `call`, adds `error` to the results."""

    def __init__(self, call: Callable[..., object], error: float) -> None:
        self.call, self.error = call, error
        self.coverage = "generated 2 of 2 ops in 1 kernels"
        self.kernels = (Kernel(),)
        self.calls = (Call(),)
        trace = types.SimpleNamespace(phases=(Phase("capture", 0.25), Phase("build", 0.5)))
        graph = types.SimpleNamespace(trace=trace, kernels=self.kernels, calls=self.calls, machine=None)
        self.compilations = (graph,)
        self.signature = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            t + self.error if t.is_floating_point() else t for t in measure.flatten(self.call(*inputs))
        )


@dataclass
class Entry:
    """Settings of the stand-in, and what it was called with."""

    error: float = 0.0
    raises: BaseException | None = None
    given: tuple[object, object, dict[str, object]] | None = None

    def compile(self, target: object, inputs: object = None, **how: object) -> Fake:
        self.given = (target, inputs, how)
        if self.raises is not None:
            raise self.raises
        module = measure.torch_module(Path(target)) if isinstance(target, str) else target
        assert callable(module)
        return Fake(module, self.error)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    made = Entry()
    monkeypatch.setitem(sys.modules, "tilewright.api", types.SimpleNamespace(compile=made.compile))
    return made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in Python and one in a file, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("net", "net.made"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "folder.tw").mkdir()
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), (torch.ones(2, 3),)\n"
        "def call():\n    return (lambda a, b: a + b), (torch.ones(2), torch.ones(2))\n"
        "def wrong():\n    return 3\n"
    )
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(file, str(tmp_path / "relu.onnx"))
    np.save(tmp_path / "x.npy", np.array([[-1, 2, 3]], dtype=np.float32))
    yield tmp_path
    sys.modules.pop("net", None)


def request(**asked: object) -> CommandRequest:
    """One that asks for nothing but what is given."""
    nothing = {"files": (), "shapes": (), "dims": (), "dtypes": (), "device": None, "precision": None}
    how = {"threads": None, "strict": False, "freeze": None, "options": (), "seed": 0, "trust": False}
    given = {"model": "m", **nothing, **how, **asked, "screen": show.Screen(None)}
    return CommandRequest(**given)  # type: ignore[arg-type]


VERBS = ("inspect", "compile", "run", "bench", "check", "explain", "env", "cache")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def test_help_names_the_verbs_in_order() -> None:
    text = invoke("--help").output
    places = [text.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)


def test_help_is_a_verb_too() -> None:
    for name in ("", *VERBS):
        asked, usual = invoke("help", *name.split()), invoke(*name.split(), "--help")
        assert (asked.exit_code, asked.output.splitlines()[1:]) == (0, usual.output.splitlines()[1:])


def test_verbs_are_told_in_whole_sentences_on_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = invoke("--help").output
    assert "..." not in text.partition("Commands:")[2] and "which ops would be kernels" in " ".join(
        text.split()
    )


def test_options_say_what_they_are_and_their_defaults() -> None:
    for name, command in cli.commands.items():
        for option in (p for p in command.params if isinstance(p, click.Option)):
            assert option.help and len(option.help.split()) >= 4, (name, option.name)
            has = isinstance(option.default, int | float | str) and not option.is_flag and not option.count
            assert not has or option.show_default or "default" in option.help, (name, option.name)


def test_compile_writes_tables_and_json(here: Path, entry: Entry) -> None:
    result = invoke("compile", "net:make", "--json", "out.json", "--threads", "1", "--option", "trim=exact")
    assert result.exit_code == 0, result.output
    assert (
        "generated 2 of 2 ops" in result.output
        and "capture" in result.output
        and "sizes: input=2x3" in result.output
    )
    facts = json.loads((here / "out.json").read_text())
    assert facts["command"] == "compile" and facts["exit_code"] == 0
    assert facts["kernels"][0]["source"] == "void k0() {}\n"
    names = [phase["name"] for phase in facts["phases"]]
    assert names[:4] == ["start", "imports", "read model", "choose inputs"]
    assert {"capture", "build", "first run"} <= set(names)
    assert entry.given is not None
    options = entry.given[2]["options"]
    assert isinstance(options, Options) and (options.threads, options.trim) == (1, "exact")


def test_a_dynamic_file_compiles_at_sizes_that_are_printed(here: Path, entry: Entry) -> None:
    result = invoke("compile", "relu.onnx", "--strict", "--no-freeze")
    assert result.exit_code == 0 and "sizes: x=2x3 (chosen; --shape takes others)" in result.output
    assert entry.given is not None and entry.given[0] == "relu.onnx"
    assert (entry.given[2]["strict"], entry.given[2]["freeze"]) == (True, False)


def test_run_reads_and_saves_arrays(here: Path, entry: Entry) -> None:
    result = invoke("run", "relu.onnx", "--input", "x=@x.npy", "--save", "outputs", "--json", "-")
    assert result.exit_code == 0
    assert np.load(here / "outputs" / "0.npy").tolist() == [[0, 2, 3]]
    facts = json.loads(result.stdout)
    assert facts["outputs"] == [
        {"output": 0, "min": 0, "mean": pytest.approx(5 / 3), "max": 3, "not finite": 0}
    ]


def test_check_passes_and_fails(here: Path, entry: Entry) -> None:
    result = invoke("check", "relu.onnx", "--shape", "x=50x3")
    assert result.exit_code == 0 and "PASS" in result.output
    entry.error = 1e-3
    assert "sizes: x=2x3 (chosen" in invoke("check", "relu.onnx").output
    result = invoke("check", "relu.onnx", "--shape", "x=50x3", "--json", "-")
    assert result.exit_code == 4 and json.loads(result.stdout)["passed"] is False
    assert invoke("check", "net:make", "-k", "1e9").exit_code == 0


def test_explain_gives_reasons_and_source(here: Path, entry: Entry) -> None:
    result = invoke("explain", "net:make", "--source")
    assert result.exit_code == 0
    for text in (
        "no legal kernel does both",
        "1.50x",
        "void k0() {}",
        "mul add[/red]",
        "1 kernels and 1 calls move 15.0 KiB; lower bound 14.0 KiB",
        "22.2%",
        "aten.addmm",
        "own",
        "12.1 KiB",
        "intermediates take -",  # the stand-in has no plan
    ):
        assert text in result.output, text


def test_bench_takes_turns_and_reports(here: Path, entry: Entry) -> None:
    result = invoke(
        "bench", "net:make", "--against", "eager", "--seconds", "0.05", "--threads", "1", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ours, eager = facts["contestants"]
    assert (ours["name"], eager["name"]) == ("tilewright", "eager")
    assert ours["time_over_tilewright"] == 1 and ours["tolerance"] == [0, 0]
    assert set(ours["latency_ms"]) == {"min", "mean", "median", "p90", "p95", "p99", "max"}
    assert facts["environment"]["torch"] and facts["threads"] == 1


def test_a_missing_peer_is_a_line(here: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {**measure.PEERS, "inductor": lambda w, t: measure.Unavailable("no headers")}
    monkeypatch.setattr(measure, "PEERS", peers)
    result = invoke("bench", "net:make", "--against", "inductor", "--seconds", "0.05")
    assert result.exit_code == 0 and "inductor: not available: no headers" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "nothing.onnx"), "no such file"),
        (("compile", "nonsense"), "names no model"),
        (
            ("compile", "net.py"),
            "names no model. Hint: name its function that returns (module, example_inputs): net:FUNCTION",
        ),
        (("compil", "net:make"), "Did you mean 'compile'? Hint: `tilewright --help`"),
        ((), "\n  inspect "),
        (("help", "compil"), "Did you mean 'compile'? Hint: `tilewright --help`"),
        (("compile", "net:make", "-o"), "requires an argument. Hint: `tilewright compile --help`"),
        (("run", "folder.tw"), "it is a folder (at folder.tw)"),
        (("run", "relu.onnx", "--device", "gpu"), "no device 'gpu' (op --device). Hint: cpu, cuda or cuda:0"),
        (("compile", "missing_module:f"), "missing_module"),
        (("compile", "net:absent"), "absent"),
        (("compile", "net:wrong"), "does not return a pair"),
        (("compile", "net:make", "--option", "thread=1"), "did you mean 'threads'"),
        (("compile", "net:make", "--option", "trim=none"), "trim"),
        (("run", "relu.onnx", "--dim", "x=n"), "not a dim"),
        (("run", "relu.onnx", "--dim", "x:0=n[4..2]"), "not a dim"),
        (("run", "relu.onnx", "--dtype", "float61"), "not a type"),
        (("run", "relu.onnx", "--precision", "fp16"), "a file has its own types"),
        (("run", "relu.onnx", "--device", "nowhere"), "no device 'nowhere'"),
        (("run", "relu.onnx", "--shape", "z=1x3"), "no input is called 'z'"),
        (("run", "relu.onnx", "--shape", "x=1xq"), "not a shape"),
        (("run", "relu.onnx", "--shape", "x"), "not name=value"),
        (("run", "relu.onnx", "--input", "x=@gone.npy"), "no such file"),
        (("run", "relu.onnx", "--input", "x=@net.py"), "not a .npy array"),
        (("run", "relu.onnx", "--input", "x=@x.npy", "--input", "x=@x.npy"), "twice"),
        (("bench", "net:make", "--against", "tensorflow"), "unknown peer"),
        (("compile",), "Missing argument"),
        (("compile", "net:make", "--threads", "0"), "threads"),
        (("compile", "net:make", "--json", "no/such/folder/x.json"), "cannot write"),
    ],
)
def test_wrong_use_is_exit_code_2(here: Path, entry: Entry, arguments: tuple[str, ...], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and text in result.output, result.output
    assert "Traceback" not in result.output


def test_a_wrong_option_is_told_before_the_model_is_read(
    here: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "load", pytest.fail)
    monkeypatch.setattr("tilewright.cli.work.load", pytest.fail)
    result = invoke("run", "relu.onnx", "--option", "thread=1")
    assert result.exit_code == 2 and "did you mean 'threads'" in result.output


def test_a_broken_file_is_wrong_use(here: Path, entry: Entry) -> None:
    (here / "bad.onnx").write_bytes(b"not a model")
    assert invoke("compile", "bad.onnx").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedError("sort", phase="capture", op="sort"), 3),
        (BuildError("g++ failed", phase="build"), 1),
        (InputError("rank", phase="bind"), 2),
    ],
)
@pytest.mark.parametrize("verb", ["compile", "bench"])
def test_errors_have_codes_and_go_to_json(
    here: Path, entry: Entry, error: Exception, code: int, verb: str
) -> None:
    entry.raises = error
    result = invoke(verb, "net:make", "--json", "out.json")
    assert result.exit_code == code
    facts = json.loads((here / "out.json").read_text())
    assert facts["exit_code"] == code and facts["error"]["type"] == type(error).__name__


def test_an_interrupted_verb_keeps_what_it_found(here: Path, entry: Entry) -> None:
    entry.raises = KeyboardInterrupt()
    result = invoke("compile", "net:make", "--json", "out.json")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert json.loads((here / "out.json").read_text())["exit_code"] == 130


def test_a_file_that_cannot_be_written_is_told_before_the_work(here: Path, entry: Entry) -> None:
    result = invoke("compile", "net:make", "--json", "absent/out.json")
    assert result.exit_code == 2 and "cannot write absent/out.json" in result.stderr
    assert not hasattr(entry, "given") or entry.given is None


def test_phases_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, quiet in ((True, False), (False, False), (True, True)):
        screen = show.Screen(None, verbose=verbose, quiet=quiet)
        with screen.watching("compiling m"), progress.phase("build"):
            progress.count("build", 0, 2)
        assert bool(capsys.readouterr().err) == (verbose and not quiet)


def test_a_terminal_shows_the_phase_and_how_far_it_is() -> None:
    screen = show.Screen(None)
    screen.err = Console(file=io.StringIO(), force_terminal=True, width=80)
    with screen.watching("compiling [red]\x1b[31m m"), progress.phase("build"):
        progress.count("build", 1, 3)
        time.sleep(0.2)  # it is drawn ten times a second
    shown = screen.err.file.getvalue()  # type: ignore[attr-defined]
    assert "build 2 of 3" in shown and "[red]" in shown and "\x1b[31m m" not in shown


def test_functions_and_random_inputs(here: Path) -> None:
    loaded = model.load("net:call")
    assert loaded.names == ("a", "b") and isinstance(loaded.eager, nn.Module)
    a, b = sizes.choose(request(shapes=("a=5",), seed=1), loaded).inputs
    again, _ = sizes.choose(request(shapes=("a=5",), seed=1), loaded).inputs
    assert a.shape == (5,) and torch.equal(a, again) and b.shape == (2,)


def test_nothing_in_an_array_file_is_executed(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"not a \.npy array"):
        model.read_array(str(tmp_path / "o.npy"))


def test_names_from_a_model_stay_plain() -> None:
    assert show.plain("[red]x[/red]\x1b[31m\n").plain == "[red]x[/red]�[31m�"


def test_cells_and_json() -> None:
    assert [show.cell_text(c) for c in (None, 1234567, 0.01234, 12345.6, float("inf"), "t")] == [
        "-",
        "1,234,567",
        "0.0123",
        "12,346",
        "inf",
        "t",
    ]
    assert show.strict_json({"a": (float("nan"), Path("p"))}) == {"a": ["nan", "p"]}


def test_tolerance() -> None:
    x = torch.tensor([1.0, 2.0, float("inf"), float("nan")])
    assert bench.tolerance([x], [x]) == bench.Tolerance(0, 0)
    found = bench.tolerance([x + torch.tensor([0, 0.5, 0, 0])], [x])
    assert (found.absolute, found.relative) == (0.5, 0.25)
    assert bench.tolerance([x], [x[:2]]).absolute == float("inf")
    assert bench.tolerance([torch.zeros(1)], [torch.tensor([float("nan")])]).absolute == float("inf")


def test_help_does_not_import_torch() -> None:
    code = "import sys, tilewright.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
