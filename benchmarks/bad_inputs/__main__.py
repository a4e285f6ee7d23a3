"""`python -m benchmarks.bad_inputs --json FILE`: each bad input of a list gets a line, a hint, the right exit code."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from click.testing import CliRunner

from benchmarks import record
from benchmarks.bad_inputs.cases import CALLED, TYPED, Called, Typed
from benchmarks.bad_inputs.files import write_all
from tilewright.cli.command import cli
from tilewright.errors import TilewrightError

HINT = "Hint: "


@dataclass(frozen=True)
class Outcome:
    """What one bad input got: what was said, and what is wrong with that (nothing, if all is well)."""

    name: str
    said: str
    wrong: tuple[str, ...]


def judged(name: str, said: str, word: str, wrong: tuple[str, ...] = ()) -> Outcome:
    """By the rules that hold for each: one line, a hint, and the word."""
    lines = said.strip().splitlines()
    if len(lines) != 1:
        wrong += (f"{len(lines)} lines",)
    if HINT not in said:
        wrong += ("no hint",)
    if word not in said:
        wrong += (f"does not say {word!r}",)
    return Outcome(name, said.strip(), wrong)


def typed(case: Typed) -> Outcome:
    """What a command line gets, run in this process."""
    with _environment(case.environment):
        result = CliRunner().invoke(cli, list(case.words))
    told = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("warning:")]
    wrong: tuple[str, ...] = () if result.exit_code == case.code else (f"exit code {result.exit_code}",)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Outcome(case.name, repr(result.exception)[:300], (*wrong, "a traceback"))
    return judged(case.name, "\n".join(told), case.says, wrong)


def called(case: Called) -> Outcome:
    """What a call gets."""
    try:
        case.call()
    except TilewrightError as error:
        kind = () if isinstance(error, case.error) else (f"a {type(error).__name__}",)
        return judged(case.name, str(error), case.says, kind)
    except Exception as error:  # noqa: BLE001 - whatever is raised is shown
        return Outcome(case.name, f"{type(error).__name__}: {error}"[:300], ("no error of ours",))
    return Outcome(case.name, "", ("nothing was raised",))


@contextmanager
def _environment(given: Mapping[str, str]) -> Generator[None]:
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def there(folder: Path) -> Generator[None]:
    """In a folder with the files, whose modules can be imported."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        write_all(folder)
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="write all outcomes there"
)
def main(path: Path | None) -> None:
    """Try all, print what is wrong."""
    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, there(Path(place)):
        found = [*map(typed, TYPED), *map(called, CALLED)]
    for outcome in found:
        if outcome.wrong:
            click.echo(f"{outcome.name}: {', '.join(outcome.wrong)}\n    {outcome.said}")
    bad = [o for o in found if o.wrong]
    click.echo(f"{len(found)} bad inputs, {len(bad)} told otherwise, {time.perf_counter() - start:.1f} s")
    if path is not None:
        rows = [{"input": o.name, "said": o.said, "wrong": list(o.wrong)} for o in found]
        facts = {"count": len(found), "wrong": len(bad), "inputs": rows}
        record.write_json(path, {**record.provenance(torch.get_num_threads()), **facts})
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
