"""`python -m demo`: read a picture, search sentences, answer a question, compare the contestants.

Exit code: 0 if Tilewright's strings, embeddings and words agree with the reference, 1 if not or if it cannot run,
2 if the model files cannot be obtained.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from rich.console import Console

try:
    importlib.import_module("tilewright.api")  # which peers can do without, and then run for minutes
    import tilewright
    from demo import contest, ocr, search, weights
    from demo.contest import OURS, Job
    from demo.screen import Screen, screen
    from tilewright import measure
    from tilewright.measure import Call, Workload
    from tilewright.report.taken import Reported
    from tilewright.report.write import graphs_page
except ImportError as missing:
    sys.exit(
        f"demo: Tilewright or a package that it needs cannot be imported: {missing}. `make demo` installs all"
    )

HERE = Path(__file__).resolve().parent
REFERENCES = ("onnxruntime", "eager", "inductor")  # the first that can run
EMBEDDING_TOLERANCE = 1e-4
PART_FILES = {name: f"{name}.onnx" for name in ("detection", "classification", "recognition")}


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
        if isinstance(built, measure.BuiltPeer):
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
    """Read the picture with Tilewright, or with the first other one that can; write the annotated picture."""
    name = next((n for n in (OURS, *REFERENCES) if all(n in job.ready() for job in jobs)), None)
    if name is None:
        return Verdict(("no contestant can read the picture", *failures(jobs)), False)
    image = Image.open(picture).convert("RGB")
    lines = read_with(name, jobs, image, folder, threads)
    out.mkdir(parents=True, exist_ok=True)
    ocr.annotate(image, lines).save(out / "annotated.png")
    report = [f"read by {contest.NAMES[name]}:"]
    report += [f"  {i:2d}  {line.score:.3f}  {line.text}" for i, line in enumerate(lines, start=1)]
    report.append(f"annotated picture: {out / 'annotated.png'}")
    expected = picture.with_name("expected.txt") if picture.parent == HERE else None
    wrong = compare_lines([line.text for line in lines], search.read_lines(expected)) if expected else []
    report += wrong or (["all lines are as drawn"] if expected else [])
    report += failures(jobs) if name != OURS else []
    return Verdict(tuple(report), not wrong and name == OURS)


def failures(jobs: Sequence[Job]) -> list[str]:
    """Why Tilewright cannot run, if it cannot."""
    reasons = [reason for job in jobs if (reason := job.why_not(OURS))]
    return [f"Tilewright could not run: {'; '.join(reasons)}"] if reasons else []


def compare_reading(jobs: Sequence[Job], picture: Path, folder: Path, threads: int) -> Verdict:
    """Whether Tilewright reads the same strings as the first other one that can."""
    able = [n for n in (OURS, *REFERENCES) if all(n in job.ready() for job in jobs)]
    if OURS not in able:
        return Verdict((), True)  # it is told elsewhere
    if len(able) < 2:
        return Verdict(("no other runtime to compare with",), True)
    image = Image.open(picture).convert("RGB")
    ours, theirs = (
        [line.text for line in read_with(n, jobs, image, folder, threads)] for n in (OURS, able[1])
    )
    told = "the same strings as" if ours == theirs else "OTHER strings than"
    return Verdict((f"{told} {contest.NAMES[able[1]]}",), ours == theirs)


def compare_lines(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """One line for each string that was drawn but not read, and for each read but not drawn."""
    missed = [f"not read: {text!r}" for text in expected if text not in found]
    return missed + [f"read, but not drawn: {text!r}" for text in found if text not in expected]


def judge_search(job: Job, tokenise: search.Tokenise, threads: int) -> Verdict:
    """Embed sentences and queries with Tilewright, or else with eager; list the best matches."""
    name, call = _embedding(job)
    sentences, queries = (search.read_lines(HERE / f"{n}.txt") for n in ("sentences", "queries"))
    corpus, asked = embed(call, tokenise, threads)
    report = [f"sentence search by {contest.NAMES[name]}:"]
    for query, vector in zip(queries, asked, strict=True):
        report.append(f"  {query}")
        matches = search.best_matches(vector, corpus, sentences, count=2)
        report += [f"      {match.score:.3f}  {match.sentence}" for match in matches]
    return Verdict((*report, *failures([job])), name == OURS)


def _embedding(job: Job) -> tuple[str, Call]:
    ours = job.ready().get(OURS)
    assert isinstance(job.workload.target, torch.nn.Module)
    return (OURS, ours.call) if ours is not None else ("eager", job.workload.target)


def embed(call: Call, tokenise: search.Tokenise, threads: int) -> tuple[search.Array, search.Array]:
    """Sentences and queries as vectors."""
    with measure.settings(threads):
        corpus, asked = (
            measure.flatten(call(*tokenise(search.read_lines(HERE / f"{n}.txt"))))[0].numpy()
            for n in ("sentences", "queries")
        )
    return corpus, asked


def compare_search(job: Job, tokenise: search.Tokenise, threads: int) -> Verdict:
    """Whether Tilewright's embeddings are eager's."""
    name, call = _embedding(job)
    if name != OURS:
        return Verdict((), True)  # it is told elsewhere
    assert isinstance(job.workload.target, torch.nn.Module)
    pairs = zip(embed(call, tokenise, threads), embed(job.workload.target, tokenise, threads), strict=True)
    gap = max(float(np.abs(a - b).max()) for a, b in pairs)
    agrees = gap <= EMBEDDING_TOLERANCE
    word = "agree with" if agrees else "DIFFER FROM"
    return Verdict((f"embeddings {word} eager (largest difference {gap:.1e})",), agrees)


def attempt(what: str, judge: Callable[[], Verdict]) -> Verdict:
    """The verdict of `judge`; an error in it, such as a later shape that does not run, is a verdict too."""
    try:
        return judge()
    except Exception as error:  # noqa: BLE001 - the table is worth showing even then
        return Verdict((f"{what} failed: {measure.one_line(error)}",), False)


def tell(console: Console, verdict: Verdict) -> None:
    """Print a verdict."""
    if verdict.lines:
        console.print("\n".join(verdict.lines), markup=False, highlight=False, soft_wrap=True)
        console.print()


@dataclass(frozen=True)
class Demo:
    """What is read and searched, by whom, and where it is told."""

    console: Console
    picture: Path
    out: Path
    peers: Sequence[str]
    threads: int
    seconds: float
    tokens: int = 0
    """How much the language model writes; 0 leaves it out."""
    page: bool = False
    """Whether a report of the models is written beside the annotated picture."""
    graphs: list[Reported] = field(default_factory=list[Reported])

    def run(self) -> bool:
        """The whole demo; whether everything agrees."""
        tell(self.console, Verdict((self.what_happens(),), True))
        with screen(self.console, 9 + 4 * (len(self.peers) + 2)) as shown:
            folder = weights.obtain(weights.OCR, report=shown.say) / "ocr"
            weights.obtain(weights.SENTENCES, report=shown.say)
            if self.tokens:
                weights.obtain(weights.LANGUAGE, report=shown.say)
            parts, reading = self.read(folder, shown)
            sentences, tokenise, searching = self.search(shown)
            if self.page:
                tell(self.console, attempt("writing the page", self.write_page))
            jobs = self.contested([*parts, sentences], shown)
            compared = attempt(
                "comparing", lambda: compare_reading(jobs[:-1], self.picture, folder, self.threads)
            )
            found = attempt("comparing", lambda: compare_search(jobs[-1], tokenise, self.threads))
            timings = self.timed(jobs, shown)
        self.conclude(jobs, timings, (compared, found))
        written = attempt("writing", self.write) if self.tokens else Verdict((), True)
        tell(self.console, written)
        return all(v.agrees for v in (reading, searching, compared, found, written))

    def what_happens(self) -> str:
        """What a reader has to wait for."""
        names = ", ".join(contest.NAMES[n] for n in self.peers)
        beside = (
            f" Then {names} build the same models, and all are timed in turn: some minutes." if names else ""
        )
        last = " At the end a language model answers a question, word by word." if self.tokens else ""
        return (
            "Tilewright compiles three models that read a picture and one that searches sentences, and says what it"
            f" finds: under a minute, a few seconds with a warm cache.{beside}{last}"
        )

    def write(self) -> Verdict:
        """A language model answers: its text while it is made, and how many tokens each contestant makes a second."""
        from demo import language  # transformers is imported only where it is used

        writer = language.real(weights.FOLDER / language.FILE)
        self.console.print(f"\n{writer.note}\n{language.QUESTION}\n", markup=False, highlight=False)
        names = [OURS, *(n for n in self.peers if n != "onnxruntime")]

        def say(text: str) -> None:
            self.console.print(text, markup=False, highlight=False)

        with measure.settings(self.threads):
            made = language.compared(writer, names, language.QUESTION, self.tokens, say)
        if "eager" not in made:
            return Verdict((), True)
        agrees = made[OURS][0] == made["eager"][0]
        return Verdict((f"{'the same' if agrees else 'OTHER'} tokens as eager",), agrees)

    def read(self, folder: Path, shown: Screen) -> tuple[list[Job], Verdict]:
        """The models that read, as Tilewright built them, and what it read."""
        shown.say("reading the picture once to learn the shapes")
        inputs = record_inputs(opened(self.picture), folder, self.threads)
        parts = [Workload(name, folder / PART_FILES[name], (x,)) for name, x in inputs.items()]
        jobs = [self.built(workload, shown) for workload in parts]
        shown.say("reading")
        verdict = attempt(
            "reading", lambda: judge_reading(jobs, self.picture, folder, self.out, self.threads)
        )
        tell(self.console, verdict)
        return jobs, verdict

    def search(self, shown: Screen) -> tuple[Job, search.Tokenise, Verdict]:
        """The same for sentences."""
        shown.say("loading the sentence model")
        embedder, tokenise = search.load(weights.FOLDER / "sentences")
        tokens = tokenise(search.read_lines(HERE / "sentences.txt"))
        dims = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
        job = self.built(Workload("sentences", embedder, tokens, dims), shown)
        shown.say("searching")
        verdict = attempt("searching", lambda: judge_search(job, tokenise, self.threads))
        tell(self.console, verdict)
        return job, tokenise, verdict

    def built(self, workload: Workload, shown: Screen) -> Job:
        """A workload with Tilewright alone, whose graphs are noted for the page."""
        known = tilewright.compilations()
        job = contest.build(workload, (OURS,), self.threads, shown.say)
        self.graphs.extend(contest.graphs_of(job, known))
        return job

    def write_page(self) -> Verdict:
        """The report of all models, beside the annotated picture."""
        self.out.mkdir(parents=True, exist_ok=True)
        graphs_page("Tilewright demo", self.graphs, self.out / "report.html")
        return Verdict((f"report page: {self.out / 'report.html'}",), True)

    def contested(self, jobs: Sequence[Job], shown: Screen) -> list[Job]:
        """The jobs with all peers beside Tilewright, which come last in no table."""
        return [
            contest.beside(contest.build(job.workload, self.peers, self.threads, shown.say), job)
            for job in jobs
        ]

    def timed(self, jobs: Sequence[Job], shown: Screen) -> list[dict[str, measure.Timing]]:
        """Timings of each job; the table grows with them."""
        timings: list[dict[str, measure.Timing]] = []
        for job in jobs:
            timings.append(contest.time_job(job, self.threads, self.seconds, shown.say))
            shown.show(contest.table(list(zip(jobs, timings, strict=False)), self.threads))
        return timings

    def conclude(
        self, jobs: Sequence[Job], timings: Sequence[dict[str, measure.Timing]], verdicts: Sequence[Verdict]
    ) -> None:
        """The table, what is behind it, and one sentence."""
        console, timed = self.console, list(zip(jobs, timings, strict=True))
        console.print(contest.table(timed, self.threads))
        for line in (*contest.unavailable_lines(jobs), *contest.coverage_lines(jobs)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(
            "first call: from the model to its first result, compilation included (caches as they are). peak"
            " mem: growth of resident memory up to then. p50 and p90: contestants timed in turn.",
            style="dim",
        )
        told = [line for v in verdicts for line in v.lines]
        speeds = contest.speed_words(timed)
        console.print(
            "\nTilewright: " + "; ".join([*told, *speeds]), markup=False, highlight=False, soft_wrap=True
        )


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
@click.option(
    "--tokens", type=click.IntRange(min=0), default=64, show_default=True, help="what a language model writes"
)
@click.option("--page", is_flag=True, help="write a report page of the models, too")
def main(picture: Path, out: Path, against: str, **more: Any) -> None:
    """Run the demo and exit with its verdict."""
    contest.quiet()
    warnings.filterwarnings("ignore")  # torch, its exporter and transformers warn about their own insides
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        peers = [name for name in contest.NAMES if name != OURS and name in against.split(",")]
        more["threads"] = more["threads"] or torch.get_num_threads()
        agrees = Demo(console, picture, out, peers, **more).run()
    except weights.WeightsError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(2)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
