"""The command: `record` writes what is decided and printed for each program and machine, `compare` tells two such
folders apart."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import click

from tests.replay.programs import Program, programs
from tests.replay.recorder import Texts, digest, recording

MACHINES = ("x86-64-v4", "sm_80", "sm_90", "gfx942")
SHOWN = 40
"""Lines of the first difference that are printed."""


def recorded(program: Program, machine: str) -> Texts:
    """The parts of one program; an error is a part as well."""
    import torch

    torch._dynamo.reset()
    with recording(machine) as recorder:
        try:
            program.compiled()
        except Exception as error:  # noqa: BLE001  a training step runs what was not built; all was told before
            recorder.texts["error"] = f"{type(error).__name__}: {str(error)[:200]}\n"
    return recorder.texts


@click.group(help=__doc__)
def main() -> None:
    """See the group."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--only", default="", help="programs whose names match")
@click.option("--machine", "machines", multiple=True, default=MACHINES, show_default=True)
@click.option("--models/--no-models", default=True, show_default=True)
def record(folder: Path, only: str, machines: tuple[str, ...], models: bool) -> None:
    """Write FOLDER/MACHINE/PROGRAM.txt and FOLDER/digests.json."""
    warnings.filterwarnings("ignore")
    os.environ["TILEWRIGHT_CACHE_DIR"] = tempfile.mkdtemp()  # decisions are made, not recalled
    digests: dict[str, str] = {}
    for program in programs():
        if not re.search(only, program.name) or (program.model and not models):
            continue
        for machine in machines:
            texts = recorded(program, machine)
            path = folder / machine / f"{program.name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"=== {name}\n{texts[name]}" for name in sorted(texts)))
            digests[f"{machine}/{program.name}"] = digest(texts)
            failed = f": {texts['error'].strip()}" if "error" in texts else ""
            click.echo(
                f"{digests[f'{machine}/{program.name}']} {len(texts):4} {machine} {program.name}{failed}"
            )
    (folder / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


@main.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Name each program that differs, its parts that do, and the first difference; leaves with 1 if there is one."""
    one, other = (json.loads((f / "digests.json").read_text()) for f in (before, after))
    different = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    for n, name in enumerate(different):
        if name not in one or name not in other:
            click.echo(f"{name}: only {'after' if name in other else 'before'}")
            continue
        texts = [(f / f"{name}.txt").read_text() for f in (before, after)]
        parts = [dict(re.findall(r"=== (.*)\n((?:(?!=== ).*\n)*)", t)) for t in texts]
        kinds = sorted(
            {k.rsplit(".")[-1] for k in {*parts[0], *parts[1]} if parts[0].get(k) != parts[1].get(k)}
        )
        click.echo(f"{name}: {', '.join(kinds)}")
        if not n:
            lines = difflib.unified_diff(*(t.splitlines() for t in texts), lineterm="", n=2)
            click.echo("\n".join([line[:200] for line, _ in zip(lines, range(SHOWN), strict=False)]))
    click.echo(f"{len(one)} before, {len(other)} after, {len(different)} different")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
