"""How a compiled model meets its user: what it says of itself, of wrong names, and of being compiled again."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError, RecompileWarning, UnknownKeyword, UnsupportedError, warn
from tilewright.report.notebook import table

NUMBERS = itertools.count()


def doubled() -> Callable[[Tensor, Tensor], Tensor]:
    """A new function each time, in a file of its own, as torch remembers sizes by place."""
    space: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    exec(compile("def doubled(x, y):\n    return x * 2 + y", f"<{next(NUMBERS)}>", "exec"), space)
    return space["doubled"]


def test_it_prints_as_one_line_and_compiles_nothing_for_that() -> None:
    fast = tilewright.compile(nn.ReLU())
    assert repr(fast) == "<CompiledModel of ReLU: not compiled yet>"
    fast.prepare((torch.ones(3),), {})
    assert repr(fast) == "<CompiledModel of ReLU: generated 1 of 1 ops in 1 kernel>"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def html(model: object) -> Tags:
    """What a notebook shows of a model."""
    return Tags(model._repr_html_())  # type: ignore[attr-defined]


def test_a_notebook_shows_a_table_and_compiles_nothing() -> None:
    fast = tilewright.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False))
    assert html(fast).text == "Sequential : not compiled yet "
    fast.prepare((torch.ones(3, 4),), {})
    seen = html(fast)
    assert "inference" in seen.text and "aten.relu" in seen.text and " B" in seen.text
    assert [tag for tag, _ in seen.tags].count("tr") == 2
    for kind in (
        tilewright.compile(doubled()),
        tilewright.compile(doubled(), (torch.ones(3), torch.ones(3))),
    ):
        assert "doubled" in html(kind).text


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "a\u202eb\x1b[31m\0",
        "&lt;b&gt;",
        "x" * 5000,
    ],
)
def test_hostile_names_are_text_in_a_notebook(name: str, tmp_path: Path) -> None:
    hostile = type(name.replace("\0", "") or "x", (nn.ReLU,), {})()
    fast = tilewright.compile(hostile, (torch.ones(3),))
    seen = html(fast)
    assert {tag for tag, _ in seen.tags} <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attrs for _, attrs in seen.tags) and len(seen.text) < 2000
    assert "\x1b" not in seen.text and "\u202e" not in seen.text
    assert name[:10].replace("\0", "").isprintable() <= (name[:10] in seen.text)
    graph = types.SimpleNamespace(
        kind=name, kernels=[types.SimpleNamespace(name=name, ops=[name, name], bytes_moved=4)], calls=[]
    )
    rows = Tags(table(name, name, [graph] * 12))
    assert {tag for tag, _ in rows.tags} <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attrs for _, attrs in rows.tags) and "and 2 more graphs" in rows.text


def test_inputs_and_outputs_have_names_types_and_sizes() -> None:
    dims = {name: {0: ("rows", 2, 64), -1: "columns"} for name in "xy"}
    fast = tilewright.compile(doubled(), (torch.ones(3, 4), torch.ones(3, 4)), dims=dims)  # type: ignore[arg-type]
    assert [str(t) for t in fast.inputs] == ["x: float32[rows, columns]", "y: float32[rows, columns]"]
    assert [str(t) for t in fast.outputs] == ["output0: float32[rows, columns]"]
    (rows,) = (s for s in fast.signature.sizes if s.name == "rows")
    assert str(rows) == "rows = x:0, y:0 [2..64]"


def test_before_it_is_compiled_inputs_are_not_known() -> None:
    with pytest.raises(InputError, match="nothing is compiled yet"):
        _ = tilewright.compile(nn.ReLU()).inputs


def test_nested_arguments_have_paths() -> None:
    def both(pair: dict[str, Tensor], rest: list[Tensor]) -> Tensor:
        return pair["a"] + rest[0]

    fast = tilewright.compile(both, ({"a": torch.ones(2)}, [torch.ones(2)]))
    assert [t.name for t in fast.inputs] == ["pair['a']", "rest[0]"]


def test_a_file_keeps_its_names(tmp_path: Path) -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", None, 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", None, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(file, str(tmp_path / "m.onnx"))
    fast = tilewright.compile(tmp_path / "m.onnx")
    assert repr(fast) == "<CompiledModel of m.onnx: not compiled yet>"
    assert fast.inputs[0].name == "x" and fast.inputs[0].shape[::2] == ("batch", 3)  # type: ignore[index]
    assert fast.outputs[0].name == "y"


def test_an_exported_program_tells_its_ranges() -> None:
    dims = ({0: torch.export.Dim("rows", min=2, max=9)},)
    program = torch.export.export(nn.ReLU(), (torch.ones(4, 3),), dynamic_shapes=dims)
    (size,) = tilewright.compile(program).signature.sizes
    assert (size.places, size.low, size.high) == ((("input", 0),), 2, 9)


def test_dir_is_complete() -> None:
    code = "import tilewright, sys; print(*dir(tilewright)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*tilewright.__all__, "__version__"} <= set(done.stdout.split())


def test_unknown_keywords_are_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownKeyword, match="compile takes no 'dim'.*did you mean 'dims'"):
        tilewright.compile(nn.ReLU(), dim={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="there is no input 'inputt'.*did you mean 'input'"):
        tilewright.compile(nn.ReLU())(inputt=torch.ones(2))


def test_other_sizes_are_told_with_dims_that_avoid_them() -> None:
    fast = tilewright.compile(doubled())
    fast(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.warns(
        RecompileWarning, match=r"x:0 was 2 and may be any size now.*dims=\{'x': \{0: 'size0'\}"
    ):
        fast(torch.ones(4, 3), torch.ones(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(torch.ones(5, 3), torch.ones(5, 3))
        fast(torch.ones(5, 3).double(), torch.ones(5, 3).double())  # no matter of sizes


def test_a_range_may_begin_at_1_and_stands_in_what_is_told() -> None:
    for first in (1, 3):
        tilewright.reset()  # torch remembers which dims have changed
        fast = tilewright.compile(nn.ReLU(), dims={"input": {0: ("batch", 1, 8)}})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for n in (first, 1, 3, 8):
                assert torch.equal(fast(torch.ones(n, 3)), torch.ones(n, 3))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"batch is 9.*Hint"):
            fast(torch.ones(9, 3))
        with pytest.warns(RecompileWarning, match=r"dims=\{'input': \{0: \('batch', 1, 8\), 1: 'size0'\}\}"):
            fast(torch.ones(4, 2))


def test_dims_that_are_named_cause_no_warning() -> None:
    fast = tilewright.compile(doubled(), dims={"x": {0: "rows"}, "y": {0: "rows"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (2, 4, 5):
            fast(torch.ones(rows, 3), torch.ones(rows, 3))


def test_warnings_name_no_line_of_ours(tmp_path: Path) -> None:
    code = "from tilewright.errors import warn\nwarn('beware')\nwarn('beware')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "<tilewright>:1: RuntimeWarning: beware\n"
    with pytest.warns(RuntimeWarning, match="again"):
        warn("again")


class Refuses(nn.Module):
    """Raises an exception of its own for some inputs, after it has counted the call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            type(self).calls += 1
            raise KeyError("two rows")
        return x * 2


def test_the_programs_own_exceptions_are_raised_as_they_are() -> None:
    fast = tilewright.compile(Refuses())
    with pytest.raises(KeyError, match="two rows") as seen:
        fast(torch.ones(2, 3))
    assert seen.value.__cause__ is None and seen.value.__context__ is None and Refuses.calls == 1
    assert seen.traceback[-1].path.name == "test_manners.py"
    with pytest.raises(UnsupportedError, match="it raises KeyError"):
        tilewright.compile(Refuses(), (torch.ones(2, 3),))
    assert torch.equal(torch.as_tensor(fast(torch.ones(3, 3))), torch.full((3, 3), 2.0))
