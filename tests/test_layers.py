"""The laws that the whole package obeys, read from its syntax: arrows, sizes, names, documentation.

Every check is a function from sources to a list of violations, so that it is tested itself on planted ones.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.layers import LAYERS, ROOT, Sources, imports, parsed, read_package

LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}

MAX_FILE = 500
MAX_NATIVE_FILE = 600
MAX_FUNCTION = 60
MAX_FOLDER = 15
MAX_PARAMETERS = 6
OP_DECLARATIONS = frozenset({"ir.ops", "capture.aten", "capture.onnx.ops"})
"""Folders that have a file for each family of ops. Their functions take what the ops take."""

FIXED_SIGNATURES: Mapping[str, str] = {
    "capture.loops.op": "torch calls what implements an operator with each of its operands",
    "capture.loops.numbers.losses": "a twin is called with the arguments of its op",
    "capture.loops.numbers.parts_at": "a twin is called with the arguments of its op",
    "runtime.call.kept_weights": "torch calls what takes the weights of one module",
}
"""Modules whose signatures others fix."""

MANY_PARAMETERS: Mapping[str, str] = {
    "analysis.loop_segments.split_range": "what a loop of a pass is cut by: one caller, in lower",
    "api.compile": "a promise: options that users name one by one",
    "capture.loops.recurrent._scanned": "the operands of torch's recurrent layers",
    "capture.loops.taken.parts._counted": "the parts of a pattern, one by one",
}
"""Functions that may have more than MAX_PARAMETERS, at most five."""

# Where a file outside capture/ may write one of the two words below, and why.
FRONTEND_WORDS = re.compile(r"(?<![a-z])(aten|onnx)(?![a-z])", re.IGNORECASE)
FRONTEND_ALLOWED: Mapping[str, str] = {
    "__init__": "says in one line what can be compiled",
    "api": "the suffix of a model file chooses the importer",
    "ways.files": "what the importer read",
    "cli.command": "the help says which files it takes, and names a peer",
    "cli.model": "the suffix of a model file chooses the importer",
    "measure": "a peer's model format",
    "report.environment": "names of packages",
}
MODEL_WORDS = re.compile(
    r"(?<![a-z])(bert|distilbert|roberta|llama|resnet|resnext|convnext|mobilenet|mobilevit|swin|minilm|gpt|h2o"
    r"|gemma|qwen|mistral|vit|deit|whisper|yolo|unet|rapidocr|paddleocr|efficientnet|vgg|alexnet|densenet)(?![a-z])",
    re.IGNORECASE,
)

# Where a number may stand in a module. Everywhere else but in NUMBERED it is a choice, and belongs into tuning/.
NUMBERED = frozenset({"tuning", "target"})
DEFINITIONS: Mapping[str, str] = {
    "accuracy.QUANTILE": "the rule of accuracy defines it",
    "accuracy.FLOAT64_ULPS": "the rule of accuracy defines it",
    "analysis.dependence.dependency.NO_CLASS": "a mark, no number",
    "analysis.runtime_checks.INDEX_ERROR": "a code that kernels write",
    "analysis.runtime_checks.DIVISION_ERROR": "a code that kernels write",
    "artifact.file.container.VERSION": "the version of a file format",
    "artifact.file.container.ALIGNMENT": "a fact of the file format",
    "artifact.file.seals._BYTES": "the length of a key of HMAC-SHA256",
    "artifact.file.seals._USERS_ALONE": "a file mode",
    "capture.aten.attention.CUDNN_HIDDEN": "what torch gives cuDNN for a false mask",
    "capture.aten.view._END": 'the largest int64 stands for "to the end"',
    "capture.loops.numbers.random_twins._SELU": "the definition of an op",
    "capture.loops.recurrent._HALF": "bits of half an int64",
    "capture.onnx.ops.cast._E4M3_LIMIT": "the definition of a float8",
    "capture.onnx.ops.vision._CUBIC": "the definition of an op",
    "capture.placement.sides.DEVICE": "a remainder of two, no size",
    "capture.symbols._LIMIT": "the end of int64",
    "emit.cpp.expr.INT32": "the end of int32",
    "emit.cpp.expr.EXACT_PRIMES": "the primes of exact arithmetic",
    "emit.gluon.layouts.OPERAND_COLUMNS": "the shape of Hopper's matrix instruction",
    "emit.triton.statements.MAX_BLOCK_ELEMENTS": "Triton's largest block",
    "form.lane_softmax.MAX_FLOAT32": "the largest float32",
    "ir.text.graph.FORMAT": "the number of a file format",
    "interp.exact.TRACELESS": "follows from 53 bits of a float64",
    "interp.exact.NEAR": "follows from 53 bits of a float64, less those that the order of a sum moves",
    "interp.fused._MODERATE": "follows from the exponents of a float64",
    "interp.modular.P0": "a prime of exact arithmetic",
    "interp.modular.COFACTORS": "follow from the primes of exact arithmetic",
    "ir.sizes.linear_form._MAX_INT64": "the largest int64",
    "ir.sizes.linear_form._MAGNITUDE_LIMIT": "beyond int64",
    "ir.sizes.linear_form._UNKNOWN_EXTENT": "half of the bits of int64",
    "ir.sizes.linear_form._MAX_INDEX_STRIDE": "a definition of the analysis of int64",
    "ir.sizes.linear_form._ASSUMED_SIZE": "a definition of the analysis of int64",
    "lower.access.descriptors.MAX_RANK": "a fact of tensor descriptors",
    "lower.access.descriptors.ALIGNMENT_BYTES": "a fact of tensor descriptors",
    "lower.access.descriptors.MAX_BOX_EXTENT": "a fact of tensor descriptors",
    "lower.access.descriptors.MAX_ELEMENT_BYTES": "a fact of tensor descriptors",
    "lower.evaluate.MIN_FACTOR": "follows from the exponents of float32",
    "lower.legalise.cpu.MIN_TRANSPOSED_LANES": "a fact of the vector headers",
    "lower.legalise.gpu.MIN_DOT_EXTENT": "a fact of Triton's products",
    "lower.legalise.index_floats.MAX_EXACT": "follows from the 24 bits of a float32",
    "lower.access.descriptors.NOWHERE": "a mark, no number",
    "lower.specialise.plan.BARRIER_BYTES": "a fact of shared memory",
    "lower.specialise.plan.HALF_BYTES": "the size of fp16 and bf16",
    "lower.variants.ALIGNMENT": "what a variant promises; 16 bytes are the widest access",
    "lower.variants.NARROW_LIMIT": "the end of int32, less a block",
    "plan.portable.FORMAT": "the version of a file format",
    "report.stored.FORMAT": "the version of a file format",
    "report.stored._BEYOND": "larger than any figure",
    "rewrite.split.origins.MAX_ORIGIN": "half of the exponents of float32",
    "runtime.cpu.huge_pages.LARGE_PAGE_BYTES": "a fact of the machine: a large page",
    "runtime.call.around.held.UNSEEN": "a mark, no number",
    "runtime.objects.reading.ANYWHERE": "a mark, no number",
    "runtime.objects.known_call.TOGETHER": "a mark, no number",
    "runtime.objects.known_call.ARRANGED": "a mark, no number",
    "runtime.objects.standing.FORM_BYTES": "a fact of torch: where tensors keep what they are",
    "runtime.objects.standing.HEAD_BYTES": "how far that is looked for",
    "runtime.objects.standing.FORM_START": "how far that is looked for",
    "runtime.cpu.pool.ABI_VERSION": "the version of a binary interface",
    "runtime.cuda.binary._VALUE": "a number of the file format",
    "runtime.cuda.binary._FRAME": "a number of the file format",
    "runtime.cuda.binary._REGISTERS": "a number of the file format",
    "runtime.cuda.descriptors.DESCRIPTOR_BYTES": "a fact of the driver's interface",
    "runtime.cuda.descriptors.DESCRIPTOR_ALIGNMENT": "a fact of the driver's interface",
    "runtime.cuda.descriptors.MAX_EXTENT": "a fact of the driver's interface",
    "runtime.cuda.descriptors.MAX_STRIDE_BYTES": "a fact of the driver's interface",
    "runtime.cuda.driver.OUT_OF_MEMORY": "a code of the driver",
    "runtime.cuda.kernels.MAX_GRID_BLOCKS": "a fact of the machine: blocks of one launch",
    "runtime.cuda.kernels.UNBUILT": "a code of the native side",
    "runtime.store.tuning_file.SCHEMA": "the version of a file format",
    "runtime.own.product.MAX_DEPTHWISE_TAPS": "the size of an array in native code",
    "runtime.own.product.MAX_FEW_CHANNELS": "the cases of a switch in native code",
    "runtime.own.product._NOT_FINITE": "a bit of the native side",
    "runtime.own.product._DENORMAL": "a bit of the native side",
}
"""Numbers that nobody chose: codes, formats, facts of a language, of arithmetic or of a driver."""

BANNED_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"})
BANNED_CALLS = frozenset({"hasattr", "eval", "torch.load", "torch.save"})


# --- arrows ------------------------------------------------------------


def wrong_arrows(sources: Sources) -> list[str]:
    """Imports upwards, and files in no room."""
    modules = frozenset(sources)
    found: list[str] = []
    for name, text in sources.items():
        room = name.split(".")[0]
        if room not in LAYER:
            found.append(f"{name}: no layer is declared for room {room!r}")
            continue
        for other, line in imports(name, text, modules):
            target = other.split(".")[0]
            if target in LAYER and LAYER[target] > LAYER[room]:
                found.append(f"{name}:{line}: imports {other}, which is above it")
    return found


def cycles(sources: Sources) -> list[str]:
    """Each import cycle once, as `a -> b -> a`."""
    modules = frozenset(sources)
    graph = {name: sorted({m for m, _ in imports(name, text, modules)}) for name, text in sources.items()}
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done and name in graph:
            for other in graph[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


# --- sizes, bans, names, documentation ------------------------------------------------------------

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def too_long(sources: Sources) -> list[str]:
    """Files above MAX_FILE lines and functions above MAX_FUNCTION."""
    found: list[str] = []
    for name, text in sources.items():
        lines = len(text.splitlines())
        if lines > MAX_FILE:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(parsed(text, name)):
            if isinstance(node, FunctionNode) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
                )
    return found


def too_many_parameters(sources: Sources) -> list[str]:
    """Functions with more than MAX_PARAMETERS; `self` and `cls` do not count."""
    return [
        f"{name} has {count} parameters"
        for name, count in _parameters(sources)
        if count > MAX_PARAMETERS and name not in MANY_PARAMETERS
    ]


def _parameters(sources: Sources) -> Iterator[tuple[str, int]]:
    """Each function whose signature is ours, and how many parameters it has."""
    for module, text in sources.items():
        if module.rpartition(".")[0] in OP_DECLARATIONS or module in FIXED_SIGNATURES:
            continue
        for node in ast.walk(parsed(text, module)):
            if isinstance(node, FunctionNode):
                a = node.args
                names = [x.arg for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x]
                yield f"{module}.{node.name}", len(names) - (names[:1] in (["self"], ["cls"]))


def too_wide(sources: Sources) -> list[str]:
    """Folders with more than MAX_FOLDER files."""
    folders = Counter(name.rpartition(".")[0] for name in sources)
    return [
        f"{name or 'the package'}: {n} files"
        for name, n in folders.items()
        if n > MAX_FOLDER and name not in OP_DECLARATIONS
    ]


def banned(sources: Sources) -> list[str]:
    """Modules and calls that the package does without, and bare excepts."""
    found: list[str] = []
    for name, text in sources.items():
        for node in ast.walk(parsed(text, name)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{name}:{node.lineno}: bare except")
            elif (
                isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS and not _is_plain(node)
            ):
                found.append(f"{name}:{node.lineno}: calls {ast.unparse(node.func)}")
            found += [f"{name}:{node.lineno}: imports {n}" for n in names if n in BANNED_MODULES]
    return found


def _is_plain(call: ast.Call) -> bool:
    """Whether a call reads tensors and numbers alone, and unpickles nothing else."""
    return any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)


def foreign_names(sources: Sources) -> list[str]:
    """Words of a front end outside capture/, and names of models anywhere."""
    found: list[str] = []
    for name, text in sources.items():
        free = name.split(".")[0] == "capture" or name in FRONTEND_ALLOWED
        for number, line in enumerate(text.splitlines(), 1):
            if not free and (word := FRONTEND_WORDS.search(line)):
                found.append(f"{name}:{number}: says {word[0]!r} outside capture/")
            if word := MODEL_WORDS.search(line):
                found.append(f"{name}:{number}: names the model {word[0]!r}")
    return found


def undocumented(sources: Sources) -> list[str]:
    """Modules, public classes and public functions without a docstring; parameters without a type."""
    found: list[str] = []
    for name, text in sources.items():
        tree = parsed(text, name)
        if tree.body and not ast.get_docstring(tree):
            found.append(f"{name}: no docstring")
        for node in tree.body:
            if isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_"):
                overloaded = any(ast.unparse(d).endswith("overload") for d in node.decorator_list)
                if not ast.get_docstring(node) and not overloaded:
                    found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
        found += [f"{name}:{line}: {what}" for line, what in _untyped(tree)]
    return found


def _untyped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
        if not isinstance(node, FunctionNode):
            continue
        a = node.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        first = 1 if id(node) in methods and not static else 0
        missing = [x.arg for x in given[first:] if x.annotation is None]
        if missing:
            yield node.lineno, f"{node.name} leaves {', '.join(missing)} untyped"
        if node.returns is None:
            yield node.lineno, f"{node.name} has no return type"


def numeric_constants(sources: Sources) -> list[str]:
    """Constants of modules that are numbers or tuples of numbers, outside the rooms for them."""
    return [
        f"{name}:{line}: {constant} is a number: it belongs into tuning/"
        for name, text in sources.items()
        if name.split(".")[0] not in NUMBERED
        for constant, line in _numbers(parsed(text, name))
        if f"{name}.{constant}" not in DEFINITIONS
    ]


def _numbers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        else:
            pairs = [(target, node.value)]
        yield from ((ast.unparse(name), node.lineno) for name, value in pairs if _is_numeric(value))


def _is_numeric(value: ast.expr) -> bool:
    """Whether an expression is made of numbers, operators and tuples only."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.BinOp):
        return _is_numeric(value.left) and _is_numeric(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_numeric(value.operand)
    return isinstance(value, ast.Tuple | ast.List) and bool(value.elts) and all(map(_is_numeric, value.elts))


CHECKS = (
    numeric_constants,
    wrong_arrows,
    cycles,
    too_long,
    too_many_parameters,
    too_wide,
    banned,
    foreign_names,
    undocumented,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check: Callable[[Sources], list[str]]) -> None:
    found = check(read_package())
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


def test_native_files_are_short() -> None:
    files = [f for end in ("*.h", "*.cpp") for f in ROOT.rglob(end)]
    long = {
        str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > MAX_NATIVE_FILE
    }
    assert not long


# --- the checks themselves ------------------------------------------------------------

DOC = '"""Doc."""\n'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from tilewright.schedule.search import x", "schedule.search"),
        ("import tilewright.schedule.search", "schedule.search"),
        ("from tilewright.schedule import search", "schedule.search"),
        ("from ..schedule import search", "schedule.search"),
        ("from ..schedule.search import best", "schedule.search"),
        ("def f():\n    from tilewright.schedule import other", "schedule.__init__"),
        ("if TYPE_CHECKING:\n    from tilewright import schedule", "schedule.__init__"),
        ("from tilewright import compile", "__init__"),
    ],
)
def test_an_import_upwards_is_found_however_written(text: str, wanted: str) -> None:
    sources = {
        "ir.expr": text,
        "ir.__init__": "",
        "schedule.__init__": "",
        "schedule.search": "",
        "__init__": "",
    }
    assert [v for v in wrong_arrows(sources) if f"imports {wanted}, which" in v]


def test_imports_downwards_and_outside_are_fine() -> None:
    sources = {
        "schedule.search": "from tilewright.ir.expr import a\nfrom .lower import b\nimport tilewrighty",
        "schedule.lower": "from tilewright.errors import e",
        "ir.expr": "",
        "errors": "",
    }
    assert not wrong_arrows(sources) and not cycles(sources)


def test_a_room_without_a_layer_is_found() -> None:
    assert wrong_arrows({"misc.helpers": ""}) and not wrong_arrows({"plan.data": ""})


def test_a_cycle_is_found() -> None:
    sources = {
        "ir.a": "from tilewright.ir.b import x",
        "ir.b": "def f():\n    from . import c",
        "ir.c": "import tilewright.ir.a",
    }
    assert cycles(sources) == ["ir.a -> ir.b -> ir.c -> ir.a"]


def test_long_files_and_functions_are_found() -> None:
    assert too_long({"errors": "\n" * 501}) and not too_long({"errors": "\n" * 500})
    body = "def f():\n" + "    x = 1\n" * 59
    assert not too_long({"errors": body})
    assert "f has 61 lines" in too_long({"errors": body + "    x = 1\n"})[0]


def test_many_parameters_are_found() -> None:
    names = [f"a{n}" for n in range(MAX_PARAMETERS)]
    few, more = (f"class C:\n    def f(self, {', '.join(ns)}): ..." for ns in (names, [*names, "**rest"]))
    assert not too_many_parameters({"errors": few, "ir.ops.view": more, "capture.loops.op": more})
    assert too_many_parameters({"errors": more}) == ["errors.f has 7 parameters"]


def test_few_functions_have_many_parameters() -> None:
    found = {name for name, count in _parameters(read_package()) if count > MAX_PARAMETERS}
    assert found == MANY_PARAMETERS.keys() and len(found) <= 5


def test_wide_folders_are_found() -> None:
    files = {f"schedule.gpu.f{n}": "" for n in range(15)}
    assert not too_wide(files | {"schedule.cpu.f": ""})
    assert too_wide(files | {"schedule.gpu.g": ""}) == ["schedule.gpu: 16 files"]
    assert not too_wide({f"ir.ops.f{n}": "" for n in range(30)})


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "try:\n    pass\nexcept:\n    pass",
        "hasattr(x, 'y')",
        "torch.load('f')",
        "def f():\n    import dill",
    ],
)
def test_bans(text: str) -> None:
    assert len(banned({"errors": text})) == 1
    assert not banned({"errors": "try:\n    pass\nexcept ValueError:\n    pass\nimport json"})


@pytest.mark.parametrize("line", ["# calls aten.add", "x = ONNX_OPS", "'aten::mm'"])
def test_front_end_words_stay_in_capture(line: str) -> None:
    assert foreign_names({"emit.cpp": line})
    assert not foreign_names({"capture.anything": line})


@pytest.mark.parametrize("line", ["concatenated", "import onnxruntime", "latent"])
def test_other_words_are_fine(line: str) -> None:
    assert not foreign_names({"emit.cpp": line})


@pytest.mark.parametrize("line", ["# as in BERT", "def is_resnet50(g): ...", "llama_attention", "vit_small"])
def test_no_model_is_named(line: str) -> None:
    assert foreign_names({"capture.torch": line})
    assert not foreign_names({"capture.torch": "bertrand, invite, swing, revitalise"})


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        DOC + "def f() -> None: ...",
        DOC + "class A: ...",
        DOC + "def _f(x) -> None: ...",
        DOC + "def _f(*x: int, **y) -> None: ...",
        DOC + "def _f(): ...",
        DOC + "class _A:\n    @staticmethod\n    def f(x) -> None: ...",
    ],
)
def test_gaps_of_documentation_are_found(text: str) -> None:
    assert len(undocumented({"errors": text})) == 1


def test_documented_code_is_fine() -> None:
    text = (
        DOC + 'class A:\n    """D."""\n    def f(self, x: int) -> None: ...\ndef _g(y: int) -> int: return y'
    )
    assert not undocumented({"errors": text})


@pytest.mark.parametrize(
    "text",
    [
        "MOST = 3",
        "SHARE: float = 1 / 8",
        "A, B = 1 << 20, -2.5",
        "SIZES = (4, (8, 16))",
        "NAME, MOST = 'x', 3",
    ],
)
def test_numbers_that_somebody_chose_are_found(text: str) -> None:
    assert numeric_constants({"form.exp2": text}) and not numeric_constants({"tuning.thresholds": text})


@pytest.mark.parametrize(
    "text", ["ON = True", "NAME = 'x'", "ALL = ()", "def f():\n    most = 3", "P = 6 * Q + 1"]
)
def test_other_constants_are_fine(text: str) -> None:
    assert not numeric_constants({"form.exp2": text})


def test_definitions_are_there() -> None:
    found = {f"{m}.{name}" for m, text in read_package().items() for name, _ in _numbers(parsed(text, m))}
    assert found >= DEFINITIONS.keys()
