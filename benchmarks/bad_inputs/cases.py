"""The list: what is typed or called, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tilewright import compile as compiled
from tilewright import load, save
from tilewright.errors import ArtifactError, InputError, ModelError, TilewrightError, UnsupportedError


@dataclass(frozen=True)
class Typed:
    """A command line, the exit code that it must have, and a word that its one line must hold."""

    words: tuple[str, ...]
    code: int
    says: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As it is typed."""
        given = " ".join(f"{k}={v}" for k, v in self.environment.items())
        return f"{given} tilewright {' '.join(self.words)}".strip()


@dataclass(frozen=True)
class Called:
    """A call from Python, the error that it must raise, and a word that its one line must hold."""

    name: str
    call: Callable[[], object]
    error: type[TilewrightError]
    says: str


def _t(line: str, code: int, says: str, **environment: str) -> Typed:
    return Typed(tuple(line.split()), code, says, environment)


NET = "net_bad_inputs"
MODELS = (
    _t("run absent.onnx", 2, "no such file"),
    _t("run folder.onnx", 2, "folder.onnx"),
    _t("run empty.onnx", 2, "empty.onnx"),
    _t("run cut.onnx", 2, "cut.onnx"),
    _t("run text.onnx", 2, "text.onnx"),
    _t("run unknown_op.onnx", 3, "Frobnicate"),
    _t("run unknown_domain.onnx", 3, "com.example"),
    _t("run strings.onnx", 3, "STRING"),
    _t("run no_such_output.onnx", 2, "z"),
    _t("run absent_weights.onnx", 2, "weights.bin"),
    _t("run outer_weights.onnx", 2, "weights.bin"),
    _t("run good.txt", 2, "names no model"),
    _t("run nothing", 2, "names no model"),
    _t(f"run {NET}:", 2, "names no model"),
    _t("run :make", 2, "names no model"),
    _t("run a-b:make", 2, "names no model"),
    _t("run no_such_module:make", 2, "no_such_module"),
    _t(f"run {NET}:absent", 2, "absent"),
    _t(f"run {NET}:number", 2, "number"),
    _t(f"run {NET}:nothing", 2, "pair"),
    _t(f"run {NET}:three", 2, "pair"),
    _t(f"run {NET}:uncalled", 2, "pair"),
    _t(f"run {NET}:words", 2, "tensors"),
    _t(f"run {NET}:raises", 2, "the weights are not there"),
    _t(f"run {NET}:fails", 2, "does not fit"),
    _t("run net_bad_syntax:make", 2, "syntax"),
    _t("run net_bad_import:make", 2, "no licence"),
    _t("run absent.tw", 2, "no such file"),
    _t("run empty.tw", 1, "empty.tw"),
    _t("run cut.tw", 1, "cut.tw"),
    _t("run text.tw", 1, "text.tw"),
    _t("run changed.tw", 1, "changed.tw"),
    _t("run version.tw", 1, "version.tw"),
    _t("run absent.pt2", 2, "no such file"),
    _t("run text.pt2", 2, "torch cannot load"),
    _t(f"compile {NET}:sorts --strict", 3, "svd"),
)
SIZES = (
    _t("run good.onnx --shape q=2x3", 2, "q"),
    _t("run good.onnx --shape x=axb", 2, "axb"),
    _t("run good.onnx --shape x=", 2, "x="),
    _t("run good.onnx --shape 2x3", 2, "2x3"),
    _t("run good.onnx --shape x=-2x3", 2, "-2x3"),
    _t("run good.onnx --shape x=2x3x4", 2, "x"),
    _t("run good.onnx --shape x=2x4", 2, "x"),
    _t("run good.onnx --shape x=99999999999x3", 2, "memory"),
    _t("run good.onnx --input x=@absent.npy", 2, "absent.npy"),
    _t("run good.onnx --input x=x.npy", 2, "x.npy"),
    _t("run good.onnx --input q=@x.npy", 2, "q"),
    _t("run good.onnx --input x=@broken.npy", 2, "broken.npy"),
    _t("run good.onnx --input x=@objects.npy", 2, "objects.npy"),
    _t("run good.onnx --input x=@words.npy", 2, "words.npy"),
    _t("run good.onnx --input x=@flat.npy", 2, "x"),
    _t("run good.onnx --input x=@whole.npy", 2, "x"),
    _t("run good.onnx --input x=@folder.onnx", 2, "folder.onnx"),
    _t("run good.onnx --dim nonsense", 2, "nonsense"),
    _t("run good.onnx --dim x:9=b", 2, "9"),
    _t("run good.onnx --dim x:0=b[5..2]", 2, "[5..2]"),
    _t("run good.onnx --dim x:0=b[a..b]", 2, "[a..b]"),
    _t("run good.onnx --dim q:0=b", 2, "q"),
    _t("run good.onnx --dtype x=nonsense", 2, "nonsense"),
    _t("run good.onnx --dtype q=float32", 2, "q"),
    _t("run good.tw --trust --dim x:0=b", 2, "--dim"),
    _t("run good.tw --trust --precision fp16", 2, "--precision"),
)
SETTINGS = (
    _t("run good.onnx --device nonsense", 2, "nonsense"),
    _t("run good.onnx --device cuda", 2, "cuda"),
    _t("run good.onnx --device meta", 2, "meta"),
    _t("run good.onnx --precision fp7", 2, "fp7"),
    _t("run good.onnx --threads 0", 2, "0"),
    _t("run good.onnx --threads many", 2, "many"),
    _t("run good.onnx --option nonsense=1", 2, "nonsense"),
    _t("run good.onnx --option threads=many", 2, "many"),
    _t("run good.onnx --option threads", 2, "threads"),
    _t("run good.onnx --option compiler=/nowhere/g++", 1, "/nowhere/g++"),
    _t("run good.onnx --seed x", 2, "x"),
    _t("run good.onnx", 2, "TILEWRIGHT_THREADS", TILEWRIGHT_THREADS="many"),
    _t("run", 2, "MODEL"),
    _t("run good.onnx more", 2, "more"),
    _t("rum good.onnx", 2, "rum"),
    _t("run good.onnx --shapes x=2x3", 2, "--shapes"),
    _t("cache nonsense", 2, "nonsense"),
)
PLACES = (
    _t("run good.onnx --json absent/out.json", 2, "absent/out.json"),
    _t("run good.onnx --json folder.onnx", 2, "folder.onnx"),
    _t("run good.onnx --save file", 2, "file"),
    _t("compile good.onnx -o absent/m.tw", 2, "absent"),
    _t("compile good.onnx -o folder.onnx", 2, "folder.onnx"),
    _t("compile good.onnx --target sm_90", 2, "--target"),
    _t("compile good.onnx -o m.tw --target sm_9", 2, "sm_9"),
    _t("compile good.onnx -o m.tw --weights here", 2, "here"),
    _t("report good.onnx -o absent/r.html", 2, "absent"),
    _t("report good.onnx -o r.html --against absent.json", 2, "absent.json"),
    _t("report good.onnx -o r.html --against broken.json", 2, "broken.json"),
    _t("report good.onnx -o r.html --against numbers.json", 2, "numbers.json"),
    _t("bench good.onnx --against nonsense", 2, "nonsense"),
    _t("bench good.onnx --seconds -1", 2, "-1"),
    _t("bench good.onnx --seconds long", 2, "long"),
    _t("bench good.onnx --over nonsense", 2, "nonsense"),
    _t("bench good.onnx --over q=1,2", 2, "q"),
    _t("bench good.onnx --over rows=0", 2, "0"),
    _t("bench good.onnx --html absent/b.html", 2, "absent"),
    _t("check good.onnx --against nonsense", 2, "nonsense"),
)
TYPED = (*MODELS, *SIZES, *SETTINGS, *PLACES)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _ready() -> Any:
    return compiled("good.onnx", (torch.ones(2, 3),))


X = torch.ones(2, 3)
CALLED = (
    Called("compile a number", lambda: compiled(3), InputError, "int"),  # type: ignore[arg-type]
    Called("compile a class", lambda: compiled(nn.ReLU), InputError, "class"),
    Called("compile twice", lambda: compiled(_ready()), InputError, "already"),
    Called("compile a text file", lambda: compiled("good.txt"), InputError, "good.txt"),
    Called("compile a scripted module", lambda: compiled(torch.jit.script(nn.ReLU())), UnsupportedError, "script"),
    Called("unknown keyword", lambda: compiled(_relu, dim={}), InputError, "dim"),  # type: ignore[call-arg]
    Called("dims of an unknown input", lambda: compiled(_relu, (X,), dims={"q": {0: "n"}}), InputError, "q"),
    Called("dims that are a word", lambda: compiled(_relu, (X,), dims="free"), InputError, "free"),
    Called("dims of a place that is not there", lambda: compiled(_relu, (X,), dims={"x": {7: "n"}}), InputError, "7"),
    Called("dims with an empty range", lambda: compiled(_relu, (X,), dims={"x": {0: ("n", 9, 2)}}), InputError, "n"),
    Called("unknown option", lambda: compiled(_relu, options={"thread": 1}), InputError, "thread"),
    Called("option of another type", lambda: compiled(_relu, options={"threads": "many"}), InputError, "many"),
    Called("unknown mode", lambda: compiled(_relu, mode="fastest"), InputError, "fastest"),
    Called("one tensor as examples", lambda: compiled(_relu, X), InputError, "tuple"),  # type: ignore[arg-type]
    Called("unknown device", lambda: compiled("good.onnx", device="nonsense"), InputError, "nonsense"),
    Called("a device that is not here", lambda: compiled("good.onnx", device="cuda"), InputError, "cuda"),
    Called("module on another device", lambda: compiled(nn.Linear(2, 2), device="cuda"), InputError, "cuda"),
    Called("example of another rank", lambda: compiled("good.onnx", (torch.ones(2),)), InputError, "x"),
    Called("inputs before compiling", lambda: compiled(_relu).inputs, InputError, "compiled"),
    Called("too few inputs", lambda: _ready()(), InputError, "x"),
    Called("too many inputs", lambda: _ready()(X, X), InputError, "1"),
    Called("an unknown name", lambda: _ready()(q=X), InputError, "q"),
    Called("another type", lambda: _ready()(X.double()), InputError, "float64"),
    Called("another size", lambda: _ready()(torch.ones(2, 4)), InputError, "4"),
    Called("no tensor", lambda: _ready()("x"), InputError, "str"),
    Called("an array of objects", lambda: _ready()(np.array([{}, 1], dtype=object)), InputError, "object"),
    Called("an array of words", lambda: _ready()(np.array(["a"])), InputError, "str"),
    Called("out of another shape", lambda: _ready()(X, out=torch.empty(5)), InputError, "out"),
    Called("out of another type", lambda: _ready()(X, out=torch.empty(2, 3, dtype=torch.int32)), InputError, "out"),
    Called("out that is a word", lambda: _ready()(X, out="y"), InputError, "out"),
    Called("too many outs", lambda: _ready()(X, out=(torch.empty(2, 3),) * 2), InputError, "2"),
    Called("save what was never called", lambda: save(compiled(_relu), "m.tw"), InputError, "compiled"),
    Called("save nothing", lambda: save(_relu, "m.tw"), InputError, "compiled"),  # type: ignore[arg-type]
    Called("save into a folder", lambda: save(_ready(), "folder.onnx"), InputError, "folder.onnx"),
    Called("save where nothing is", lambda: save(_ready(), "absent/m.tw"), InputError, "absent"),
    Called("save weights elsewhere", lambda: save(_ready(), "m.tw", weights="here"), InputError, "here"),
    Called("save for no machine", lambda: save(_ready(), "m.tw", targets=["sm_9"]), InputError, "sm_9"),
    Called("load what is not there", lambda: load("absent.tw"), ArtifactError, "absent.tw"),
    Called("load a folder", lambda: load("folder.onnx"), ArtifactError, "folder.onnx"),
    Called("load half a file", lambda: load("cut.tw"), ArtifactError, "cut.tw"),
    Called("load a changed file", lambda: load("changed.tw"), ArtifactError, "changed.tw"),
    Called("load for no device", lambda: load("good.tw", device="xpu"), InputError, "xpu"),
    Called("a program that is none", lambda: compiled("text.pt2"), ModelError, "text.pt2"),
    Called("a program on another device", lambda: compiled("text.pt2", device="cuda"), InputError, "cuda"),
)  # fmt: skip
