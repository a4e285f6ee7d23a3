"""`python -m demo`: read a picture, search sentences, compare the contestants.

Exit code: 0 if Tilewright's strings and embeddings agree with the reference, 1 if not or if it cannot run,
2 if the model files cannot be obtained.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

try:
    importlib.import_module("tilewright.api")  # which peers can do without, and then run for minutes
    from demo import contest, ocr, search, weights
    from demo.contest import OURS, Job
    from tilewright import measure
    from tilewright.measure import Call, Workload
except ImportError as missing:
    sys.exit(
        f"demo: Tilewright or a package that it needs cannot be imported: {missing}. `make demo` installs all"
    )

HERE = Path(__file__).resolve().parent
REFERENCES = ("onnxruntime", "eager", "inductor")  # the first that can run
EMBEDDING_TOLERANCE = 1e-4
PART_FILES = {name: f"{name}.onnx" for name in ("detection", "classification", "recognition")}

Say = contest.Say


@dataclass(frozen=True)
class Verdict:
    """What one half of the demo found out: lines to print, and whether all agrees."""

    lines: tuple[str, ...]
    agrees: bool


def models_of(calls: Sequence[Call]) -> ocr.Models:
    """The three models as numpy functions."""

    def plain(call: Call) -> ocr.Model:
        return lambda x: call(torch.from_numpy(x))[0].numpy()

    detect, classify, recognise = (plain(call) for call in calls)
    return ocr.Models(detect, classify, recognise)


def opened(picture: Path) -> Image.Image:
    """The picture, or wrong use in one line."""
    try:
        return Image.open(picture).convert("RGB")
    except OSError as error:
        raise click.BadParameter(f"{picture} is no picture: {error}", param_hint="--picture") from error


def record_inputs(picture: Image.Image, folder: Path, threads: int) -> dict[str, torch.Tensor]:
    """The first input of each model when the picture is read: the timed workloads."""
    first: dict[str, torch.Tensor] = {}
    calls: list[Call] = []
    for name, file in PART_FILES.items():
        workload = Workload(name, folder / file, ())
        built = reference(workload, threads)

        def call(*inputs: torch.Tensor, name: str = name, built: Call = built) -> tuple[torch.Tensor, ...]:
            first.setdefault(name, inputs[0])
            return built(*inputs)

        calls.append(call)
    with measure.settings(threads):
        ocr.read(picture, models_of(calls), ocr.characters(folder / PART_FILES["recognition"]))
    return first


def reference(workload: Workload, threads: int) -> Call:
    """A runtime other than ours, before any input is known: the first of `REFERENCES` that takes the file."""
    reasons: list[str] = []
    for name in ("onnxruntime", "eager"):
        try:
            built = measure.PEERS[name](workload, threads)
        except Exception as error:  # noqa: BLE001 - a peer's failure only means that the next one is asked
            built = measure.Unavailable(measure.one_line(error))
        if isinstance(built, measure.Built):
            return built.call
        reasons.append(f"{name}: {built.reason}")
    raise click.ClickException(f"no reference for {workload.name}: {'; '.join(reasons)}")


def read_with(
    name: str, jobs: Sequence[Job], picture: Image.Image, folder: Path, threads: int
) -> tuple[ocr.Line, ...]:
    """Read the picture with one contestant's three models."""
    calls = [job.ready()[name].call for job in jobs]
    with measure.settings(threads):
        return ocr.read(picture, models_of(calls), ocr.characters(folder / PART_FILES["recognition"]))


def judge_reading(jobs: Sequence[Job], picture: Path, folder: Path, out: Path, threads: int) -> Verdict:
    """Read the picture with Tilewright and with a reference; compare strings; write the annotated picture."""
    able = [name for name in (OURS, *REFERENCES) if all(name in job.ready() for job in jobs)]
    image = Image.open(picture).convert("RGB")
    read = {name: read_with(name, jobs, image, folder, threads) for name in able[:2]}
    if not read:
        return Verdict(("no contestant can read the picture",), False)
    lines = read[able[0]]
    out.mkdir(parents=True, exist_ok=True)
    ocr.annotate(image, lines).save(out / "annotated.png")
    report = [f"read by {contest.NAMES[able[0]]}:"]
    report += [f"  {i:2d}  {line.score:.3f}  {line.text}" for i, line in enumerate(lines, start=1)]
    report.append(f"annotated picture: {out / 'annotated.png'}")
    expected = picture.with_name("expected.txt") if picture.parent == HERE else None
    wrong = compare_lines([line.text for line in lines], search.read_lines(expected)) if expected else []
    report += wrong or (["all lines are as drawn"] if expected else [])
    if able[0] != OURS:
        reasons = [job.why_not(OURS) for job in jobs if job.why_not(OURS)]
        return Verdict((*report, "Tilewright could not run: " + "; ".join(reasons)), False)
    if len(able) > 1:
        same = [line.text for line in lines] == [line.text for line in read[able[1]]]
        report.append(f"strings {'equal' if same else 'DIFFER FROM'} those of {contest.NAMES[able[1]]}")
        return Verdict(tuple(report), same and not wrong)
    return Verdict((*report, "no other runtime to compare with"), not wrong)


def compare_lines(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """One line for each string that was drawn but not read, and for each read but not drawn."""
    missed = [f"not read: {text!r}" for text in expected if text not in found]
    return missed + [f"read, but not drawn: {text!r}" for text in found if text not in expected]


def judge_search(job: Job, tokenise: search.Tokenise, threads: int) -> Verdict:
    """Embed sentences and queries with Tilewright and with eager; compare; list the best matches."""
    sentences, queries = (search.read_lines(HERE / f"{name}.txt") for name in ("sentences", "queries"))
    assert isinstance(job.workload.target, torch.nn.Module)
    ours = job.ready().get(OURS)
    calls: dict[str, Call] = {} if ours is None else {OURS: ours.call}
    calls["eager"] = job.workload.target
    embedded: dict[str, tuple[search.Array, search.Array]] = {}
    with measure.settings(threads):
        for name, call in calls.items():
            corpus, asked = (
                measure.flatten(call(*tokenise(texts)))[0].numpy() for texts in (sentences, queries)
            )
            embedded[name] = corpus, asked
    first = next(iter(embedded))
    corpus, asked = embedded[first]
    report = [f"sentence search by {contest.NAMES[first]}:"]
    for query, vector in zip(queries, asked, strict=True):
        report.append(f"  {query}")
        matches = search.best_matches(vector, corpus, sentences, count=2)
        report += [f"      {match.score:.3f}  {match.sentence}" for match in matches]
    if ours is None:
        return Verdict((*report, f"Tilewright could not run: {job.why_not(OURS)}"), False)
    pairs = zip(embedded[OURS], embedded["eager"], strict=True)
    gap = max(float(np.abs(a - b).max()) for a, b in pairs)
    agrees = gap <= EMBEDDING_TOLERANCE
    word = "agree with" if agrees else "DIFFER FROM"
    report.append(f"embeddings {word} eager: largest difference {gap:.1e}")
    return Verdict(tuple(report), agrees)


def attempt(what: str, judge: Callable[[], Verdict]) -> Verdict:
    """The verdict of `judge`; an error in it, such as a later shape that does not run, is a verdict too."""
    try:
        return judge()
    except Exception as error:  # noqa: BLE001 - the table is worth showing even then
        return Verdict((f"{what} failed: {measure.one_line(error)}",), False)


@contextmanager
def progress(console: Console, steps: int) -> Generator[Say]:
    """A function that names the next step: a bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(f".. {text}", style="dim", highlight=False)
        return
    columns = (SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def say(text: str) -> None:
            bar.update(task, description=text, advance=1)

        yield say


def run(
    console: Console, picture: Path, out: Path, names: Sequence[str], threads: int, seconds: float
) -> bool:
    """The whole demo with the named contestants; whether everything agrees."""
    steps = 2 + 4 * (len(names) + 1) + 2
    with progress(console, steps) as say:
        folder = weights.obtain(weights.OCR, report=say) / "ocr"
        weights.obtain(weights.SENTENCES, report=say)
        say("reading the picture once to learn the shapes")
        inputs = record_inputs(opened(picture), folder, threads)
        parts = [Workload(name, folder / PART_FILES[name], (x,)) for name, x in inputs.items()]
        say("loading the sentence model")
        embedder, tokenise = search.load(weights.FOLDER / "sentences")
        tokens = tokenise(search.read_lines(HERE / "sentences.txt"))
        dims = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
        sentences = Workload("sentences", embedder, tokens, dims)
        jobs = [contest.build(workload, names, threads, say) for workload in (*parts, sentences)]
        say("reading and searching")
        reading = attempt("reading", lambda: judge_reading(jobs[:-1], picture, folder, out, threads))
        searching = attempt("searching", lambda: judge_search(jobs[-1], tokenise, threads))
        timings = [contest.time_job(job, threads, seconds, say) for job in jobs]
    for verdict in (reading, searching):
        console.print("\n".join(verdict.lines), markup=False, highlight=False, soft_wrap=True)
        console.print()
    console.print(contest.table(list(zip(jobs, timings, strict=True)), threads))
    for line in contest.coverage_lines(jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        "first call: from the model to its first result, compilation included (caches as they are). peak mem:"
        " growth of resident memory up to then. p50 and p90: contestants timed in turn.",
        style="dim",
    )
    return reading.agrees and searching.agrees


@click.command(help=__doc__)
@click.option(
    "--picture", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=HERE / "picture.png"
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=HERE.parent / "out")
@click.option(
    "--against", default="eager,inductor,onnxruntime", show_default=True, help="peers, comma-separated"
)
@click.option("--threads", type=click.IntRange(min=1), default=None, help="default: as many as torch uses")
@click.option("--seconds", type=click.FloatRange(min=0), default=1.5, help="timing per job and contestant")
def main(picture: Path, out: Path, against: str, threads: int | None, seconds: float) -> None:
    """Run the demo and exit with its verdict."""
    contest.quiet()
    warnings.filterwarnings("ignore")  # torch, its exporter and transformers warn about their own insides
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        names = [name for name in contest.NAMES if name == OURS or name in against.split(",")]
        agrees = run(console, picture, out, names, threads or torch.get_num_threads(), seconds)
    except weights.WeightsError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(2)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
