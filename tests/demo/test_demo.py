"""The demo's own parts: searching, the table, what counts as read. Runs without weights and without the network."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from demo.screen import screen
from PIL import Image
from rich.console import Console

from demo import __main__ as main
from demo import contest, ocr, search, weights
from tilewright.measure import PreparedContestant, Timing, Unavailable, Workload

HERE = Path(main.HERE)


class Encoder(torch.nn.Module):
    """Stands for a transformer: the state of a token is its id and one."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool
    ) -> tuple[torch.Tensor]:
        """States [n, length, 2]."""
        return (torch.stack([input_ids.float(), torch.ones_like(input_ids).float()], -1),)


def test_embedding_is_the_masked_mean_of_length_one() -> None:
    ids, mask = torch.tensor([[2, 4, 99], [5, 99, 99]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.nn.functional.normalize(torch.tensor([[3.0, 1.0], [5.0, 1.0]]), dim=1)
    torch.testing.assert_close(search.Embedder(Encoder())(ids, mask), expected)


def test_best_matches_are_sorted_and_stable() -> None:
    corpus = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], np.float32)
    found = search.best_matches(np.array([1.0, 0.0], np.float32), corpus, ("a", "b", "c"), count=2)
    assert [(match.sentence, match.score) for match in found] == [("b", 1.0), ("c", 1.0)]


def test_there_are_sentences_and_queries() -> None:
    sentences = search.read_lines(HERE / "sentences.txt")
    assert len(sentences) >= 40 and len(set(sentences)) == len(sentences)
    assert len(search.read_lines(HERE / "queries.txt")) >= 3


def test_picture_is_small_and_has_a_rotated_line() -> None:
    from demo.draw_picture import LABELS, SIZE

    with Image.open(HERE / "picture.png") as picture:
        assert picture.size == SIZE
    assert (HERE / "picture.png").stat().st_size < 300_000
    assert tuple(label.text for label in LABELS) == search.read_lines(HERE / "expected.txt")
    assert any(label.angle % 90 for label in LABELS) and len({label.font for label in LABELS}) >= 5


def test_compare_lines_names_what_differs() -> None:
    assert main.compare_lines(["a", "b"], ["a", "b"]) == []
    assert main.compare_lines(["a", "x"], ["a", "b"]) == ["not read: 'b'", "read, but not drawn: 'x'"]


def job(name: str) -> contest.Job:
    prepared = PreparedContestant("eager", lambda *inputs: inputs, 0.5, 1.5, 3 << 20, "")
    missing = Unavailable("ImportError: no module [x]")
    contestants = {"eager": prepared, "inductor": missing, "onnxruntime": missing, "tilewright": missing}
    return contest.Job(Workload(name, torch.nn.Identity(), (torch.zeros(2, 3),)), contestants)


def test_table_shows_missing_contestants_as_such() -> None:
    item = job("first")
    assert list(item.ready()) == ["eager"]
    assert item.why_not("tilewright") == "first: ImportError: no module [x]" and item.why_not("eager") == ""
    screen = Console(file=io.StringIO(), width=140)
    screen.print(contest.table([(item, {"eager": Timing((0.012, 0.0125))})], 2))
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "2.0 s" in text and "12.2 ms" in text and "3 MiB" in text and "2x3" in text
    assert text.count("not available") == 3
    assert len(told := contest.unavailable_lines([item, job("second")])) == 3
    assert told[0] == "Inductor is not available (first, second): ImportError: no module [x]"
    assert contest.coverage_lines([item]) == [] and contest.speed_words([(item, {})]) == []
    fast = {"eager": Timing((0.02, 0.02)), "tilewright": Timing((0.01, 0.01))}
    assert contest.speed_words([(item, fast)]) == ["2.0x the speed of eager on first"]


def test_ours_stands_behind_the_peers() -> None:
    ours = contest.Job(job("first").workload, {"tilewright": Unavailable("why")})
    peers = contest.Job(ours.workload, {"eager": Unavailable("x")})
    assert list(contest.beside(peers, ours).contestants) == ["eager", "tilewright"]


def test_reading_without_ours_falls_back_and_does_not_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ocr.Line("hello", 1.0, np.zeros((4, 2)))
    monkeypatch.setattr(main, "read_with", lambda name, *rest: (line,))
    Image.new("RGB", (8, 8)).save(tmp_path / "p.png")
    verdict = main.judge_reading([job("first")], tmp_path / "p.png", tmp_path, tmp_path / "out", 1)
    assert not verdict.agrees and "Tilewright could not run" in verdict.lines[-1]
    assert (tmp_path / "out" / "annotated.png").exists()


def test_without_a_terminal_each_step_is_a_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    with screen(console, 2) as shown:
        shown.say("one")
        shown.show("a table that will be printed again")
        shown.say("two")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ".. one\n.. two\n"


def test_on_a_terminal_the_table_stands_above_the_bar() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with screen(console, 2) as shown:
        shown.say("one")
        shown.show("the table")
        console.print("a result")
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert "a result" in told and told.rindex("the table") < told.rindex("one")


have_weights = not any(weights.missing(package) for package in weights.PACKAGES)


@pytest.mark.skipif(not have_weights, reason="the model files are not there yet: make demo downloads them")
def test_the_picture_is_read_as_drawn() -> None:
    pytest.importorskip("onnxruntime")
    folder = weights.FOLDER / "ocr"
    calls = [main.reference(Workload(name, folder / file, ()), 2) for name, file in main.PART_FILES.items()]
    alphabet = ocr.characters(folder / main.PART_FILES["recognition"])
    assert len(alphabet) == 6625 and alphabet[0] == "" and alphabet[-1] == " "
    with Image.open(HERE / "picture.png") as picture:
        lines = ocr.read(picture.convert("RGB"), main.models_of(calls), alphabet)
    assert tuple(line.text for line in lines) == search.read_lines(HERE / "expected.txt")


@pytest.mark.parametrize(("shift", "agrees"), [(0.0, True), (1e-3, False)])
def test_search_compares_ours_with_eager(shift: float, agrees: bool) -> None:
    embedder = search.Embedder(Encoder())

    def tokenise(texts: Sequence[str]) -> search.Tokens:
        ids = torch.tensor([[len(text), 1] for text in texts])
        return ids, torch.ones_like(ids)

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (embedder(*inputs) + shift,)

    workload = Workload("sentences", embedder, tokenise(["a"]))
    ours = contest.Job(workload, {"tilewright": PreparedContestant("tilewright", call, 0.0, 0.0, None, "")})
    assert main.judge_search(ours, tokenise, 1).agrees
    verdict = main.compare_search(ours, tokenise, 1)
    assert verdict.agrees is agrees
    assert verdict.lines[-1].startswith("embeddings agree" if agrees else "embeddings DIFFER")
    none = contest.Job(workload, {"tilewright": Unavailable("no compiler")})
    told = main.judge_search(none, tokenise, 1)
    assert told.lines[-1] == "Tilewright could not run: sentences: no compiler" and not told.agrees
    assert main.compare_search(none, tokenise, 1) == main.Verdict((), True)


@pytest.mark.parametrize(("other", "agrees"), [("hello", True), ("hallo", False)])
def test_readings_are_compared(
    other: str, agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, *rest: object) -> tuple[ocr.Line, ...]:
        return (ocr.Line("hello" if name == "tilewright" else other, 1.0, np.zeros((4, 2))),)

    monkeypatch.setattr(main, "read_with", read)
    Image.new("RGB", (8, 8)).save(tmp_path / "p.png")
    prepared = PreparedContestant("x", lambda *inputs: inputs, 0.5, 1.5, None, "")
    both = contest.Job(job("first").workload, {"tilewright": prepared, "onnxruntime": prepared})
    verdict = main.compare_reading([both], tmp_path / "p.png", tmp_path, 1)
    assert verdict.agrees is agrees and verdict.lines[0].endswith("strings as onnxruntime") is agrees
    alone = contest.Job(both.workload, {"tilewright": prepared})
    assert main.compare_reading([alone], tmp_path / "p.png", tmp_path, 1).agrees


def test_an_error_while_judging_is_a_verdict() -> None:
    def judge() -> main.Verdict:
        raise RuntimeError("no such shape")

    assert main.attempt("reading", judge) == main.Verdict(
        ("reading failed: RuntimeError: no such shape",), False
    )


def test_without_tilewright_the_demo_stops_at_once() -> None:
    code = "import sys, runpy; sys.modules['tilewright.api'] = None; runpy.run_module('demo', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("demo: Tilewright") and "tilewright.api" in line


def test_what_is_no_picture_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    with pytest.raises(click.BadParameter, match="no picture"):
        main.opened(tmp_path / "x.png")
