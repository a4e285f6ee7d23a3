"""The five verbs and their arguments. Heavy imports wait until a verb runs, so that --help is quick."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Concatenate

import click

from tilewright.errors import InputError, ModelError, TilewrightError, UnsupportedError

from .request import Asked, ExitCode, Request
from .show import Screen


class _Group(click.Group):
    """Lists the verbs in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tilewright")
def cli() -> None:
    """Compile PyTorch and ONNX models into faster ones.

    MODEL is an .onnx file, or package.module:function returning (module, example_inputs).

    Exit codes: 0 done, 1 error, 2 wrong use, 3 unsupported, 4 failed check.
    """


def verb(body: Callable[Concatenate[Request, ...], int]) -> Callable[..., None]:
    """Adds the arguments that all verbs share, turns errors into exit codes, and writes the JSON file."""

    @click.argument("model")
    @click.option("--input", "files", multiple=True, metavar="NAME=@FILE", help="An input from a .npy file.")
    @click.option(
        "--shape", "shapes", multiple=True, metavar="NAME=AxBxC", help="A random input of this shape."
    )
    @click.option(
        "--threads", type=click.IntRange(1), help="CPU threads, for all contestants. [default: torch's]"
    )
    @click.option("--strict", is_flag=True, help="Refuse library calls that are needed for lack of a kernel.")
    @click.option(
        "--freeze/--no-freeze", default=None, help="Take weights as constants. [default: for files]"
    )
    @click.option(
        "--option", "options", multiple=True, metavar="NAME=VALUE", help="Any other compiler option."
    )
    @click.option("--seed", default=0, show_default=True, help="Of random inputs.")
    @click.option("--json", "json_path", metavar="FILE", help="Write the results here too; - for stdout.")
    @functools.wraps(body)
    def run(json_path: str | None, **given: Any) -> None:
        screen = Screen(json_path)
        screen.facts |= {"command": body.__name__.rstrip("_"), "model": given["model"]}
        asked = {f.name: given.pop(f.name) for f in fields(Asked)}
        sys.exit(_finish(screen, lambda: body(Request(**asked, screen=screen), **given)))

    return run


def _finish(screen: Screen, body: Callable[[], int]) -> int:
    """Run a verb; its exit code. A Tilewright error is one red line and an entry of the JSON file."""
    try:
        code = body()
    except TilewrightError as error:
        screen.err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        parts = {"type": type(error).__name__, "message": error.message, "phase": error.phase}
        screen.facts["error"] = {**parts, "op": error.op, "place": error.place, "hint": error.hint}
        code = _exit_code(error)
    screen.facts["exit_code"] = code
    try:
        screen.write_json()
    except OSError as error:
        screen.err.print(
            f"error: cannot write {screen.json_path}: {error.strerror}", style="red", markup=False
        )
        return ExitCode.WRONG_USE
    return code


def _exit_code(error: TilewrightError) -> int:
    if isinstance(error, UnsupportedError):
        return ExitCode.UNSUPPORTED
    return ExitCode.WRONG_USE if isinstance(error, InputError | ModelError) else ExitCode.FAILED


@cli.command("compile")
@verb
def compile_(request: Request) -> int:
    """Compile MODEL and show its coverage, phases and kernels."""
    from . import work

    return work.compile_model(request)


@cli.command("run")
@click.option("--save", metavar="FOLDER", help="Write each output there as a .npy file.")
@verb
def run_(request: Request, save: str | None) -> int:
    """Compile MODEL, run it once, and summarise its outputs."""
    from . import work

    return work.run_model(request, save)


@cli.command("bench")
@click.option(
    "--against",
    default="eager",
    show_default=True,
    metavar="NAMES",
    help="Of eager,inductor,onnxruntime; or none.",
)
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.0), help="Per contestant.")
@verb
def bench_(request: Request, against: str, seconds: float) -> int:
    """Time MODEL beside its peers, taking turns with pauses."""
    from . import bench

    return bench.bench_model(request, against, seconds)


@cli.command("check")
@click.option(
    "-k", type=click.FloatRange(0.0), help="Errors allowed, in units of eager's own. [default: 2; half 3]"
)
@click.option("--backward", is_flag=True, help="A training step: its loss, gradients and buffers.")
@click.option("--bisect", is_flag=True, help="Find the kernel, call or rewrite that makes it wrong.")
@click.option(
    "--reproduction", default="wrong.py", show_default=True, metavar="FILE", help="Written by --bisect."
)
@verb
def check_(request: Request, k: float | None, backward: bool, bisect: bool, reproduction: str) -> int:
    """Compare MODEL's outputs with float64, beside eager's own error. Exit code 4 if they are worse."""
    from . import check

    return check.check_model(request, k, backward=backward, bisect=bisect, file=reproduction)


@cli.command("explain")
@click.option("--source", is_flag=True, help="Print each kernel's source too.")
@verb
def explain_(request: Request, source: bool) -> int:
    """Show MODEL's kernels: why each ends where it does, and its bytes against the lower bound."""
    from . import work

    return work.explain_model(request, source)


def main() -> None:
    """Entry point of the command `tilewright`."""
    cli()
