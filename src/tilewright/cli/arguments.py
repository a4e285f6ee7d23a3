"""The arguments that verbs share, and how a verb ends: an exit code, a red line, a JSON file."""

from __future__ import annotations

import errno
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Concatenate

import click
from click.shell_completion import CompletionItem

from tilewright.errors import InputError, ModelError, TilewrightError, UnsupportedError
from tilewright.options import Options

from .request import Asked, CommandRequest, ExitCode, Precision
from .show import OWN_PROCESS, Screen

Command = Callable[..., None]
TORCHS = ("torch._subclasses.fake_tensor", "torch._guards")
"""Loggers of torch that tell what it could not trace, with a stack each time."""


class Verb(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of any command; wrong use knows its verb, which click leaves out where an option lacks its value."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, each on a line of its own."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


def _files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shells complete MODEL as a file."""
    del ctx, param
    return [CompletionItem(incomplete, type="file")]


def _options(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del ctx, param
    return [CompletionItem(f"{f.name}=") for f in fields(Options) if f.name.startswith(incomplete)]


def _screened(command: Command) -> Command:
    """With the arguments that say where results go. Without its screen, a verb would not know."""
    decorated = command
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="Print verdicts, warnings and errors only."),
        click.option(
            "-v", "--verbose", count=True, help="Say on stderr what the compiler does; -vv says more."
        ),
        click.option("--json", "json_path", metavar="FILE", help="Write the results here too; - for stdout."),
    ):
        decorated = option(decorated)
    return decorated


def plain_verb(body: Callable[Concatenate[Screen, ...], int]) -> Command:
    """A verb that takes no model."""

    @_screened
    @functools.wraps(body)
    def run(json_path: str | None, verbose: int, quiet: bool, **given: Any) -> None:
        screen = Screen(json_path, quiet=quiet, verbose=verbose > 0)
        screen.facts |= {"command": body.__name__.rstrip("_")}
        sys.exit(_finish(screen, verbose, lambda: body(screen, **given)))

    return run


def verb(body: Callable[Concatenate[CommandRequest, ...], int]) -> Command:
    """A verb over a model: adds its arguments, turns errors into exit codes, and writes the JSON file."""

    @_screened
    @functools.wraps(body)
    def run(json_path: str | None, verbose: int, quiet: bool, **given: Any) -> None:
        screen = Screen(json_path, quiet=quiet, verbose=verbose > 0)
        screen.is_alone = click.get_current_context().obj == OWN_PROCESS
        screen.facts |= {"command": body.__name__.rstrip("_"), "model": given["model"]}
        asked = {f.name: given.pop(f.name) for f in fields(Asked)}
        sys.exit(_finish(screen, verbose, lambda: body(CommandRequest(**asked, screen=screen), **given)))

    for argument in reversed(_of_models()):
        run = argument(run)
    return run


def _of_models() -> tuple[Callable[[Command], Command], ...]:
    option: Any = click.option
    several = {"multiple": True}
    return (
        click.argument("model", shell_complete=_files),
        option("--input", "files", **several, metavar="NAME=@FILE", help="An input from a .npy file, as x=@x.npy."),
        option(
            "--shape", "shapes", **several, metavar="NAME=AxBxC",
            help="A random input of this shape, as x=1x3x64x64.",
        ),
        option(
            "--dim", "dims", **several, metavar="NAME:K=DIM[LO..HI]",
            help="Dim K of input NAME may change, under the name DIM; the range may be left out.",
        ),
        option(
            "--dtype", "dtypes", **several, metavar="[NAME=]TYPE",
            help="Element type of random inputs: fp32, fp16, int64, bool and others. [default: the model's]",
        ),
        option("--device", metavar="DEVICE", help="cpu, cuda or cuda:K. [default: the model's]"),
        option(
            "--precision", type=click.Choice([p.value for p in Precision]),
            help="Take weights and floating inputs in this type; tf32 keeps float32 and rounds products on GPUs.",
        ),
        option("--threads", type=click.IntRange(1), help="CPU threads, for all contestants. [default: torch's]"),
        option("--strict", is_flag=True, help="Refuse library calls that are needed for lack of a kernel."),
        option(
            "--freeze/--no-freeze", default=None,
            help="Take weights as constants. [default: of files, but not of functions]",
        ),
        option(
            "--option", "options", **several, metavar="NAME=VALUE", shell_complete=_options,
            help="Any other compiler option; docs/options.md lists them.",
        ),
        option("--seed", default=0, show_default=True, help="Seed of random inputs."),
        option("--trust", is_flag=True, help="Run the machine code of a MODEL.tw that another user has made."),
    )  # fmt: skip


def _finish(screen: Screen, verbose: int, body: Callable[[], int]) -> int:
    """Run a verb; its exit code. A Tilewright error is one red line and an entry of the JSON file, and so is a warning,
    in yellow."""
    _listen(screen, verbose)
    try:
        screen.try_json()
    except OSError as error:
        return _unwritable(screen, error)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, screen)
            code = body()
    except TilewrightError as error:
        screen.err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        parts = {"type": type(error).__name__, "message": error.message, "phase": error.phase}
        screen.facts["error"] = {**parts, "op": error.op, "place": error.place, "hint": error.hint}
        code = _exit_code(error)
    except KeyboardInterrupt:
        screen.err.print("interrupted: what was found until now is kept", style="yellow", markup=False)
        code = ExitCode.INTERRUPTED
    screen.facts["exit_code"] = code
    try:
        screen.write_json()
    except OSError as error:
        return _unwritable(screen, error)
    return code


def _unwritable(screen: Screen, error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # who read has what it wanted
        return ExitCode.FAILED
    place = "stdout" if screen.json_path == "-" else screen.json_path
    hint = "make room there" if error.errno == errno.ENOSPC else "name a file in a folder that exists"
    said = f"error: cannot write {place}: {error.strerror}. Hint: {hint}"
    screen.err.print(said, style="red", markup=False, soft_wrap=True)
    return ExitCode.WRONG_USE


def _show_warning(screen: Screen, message: Warning | str, *place: object, **rest: object) -> None:
    """A warning as one line, without the line of source that gave it."""
    del place, rest
    text = " ".join(str(message).split())
    screen.err.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)
    screen.warnings.append(text)
    screen.facts["warnings"] = list(screen.warnings)


def _listen(screen: Screen, verbose: int) -> None:
    """Show on stderr what the compiler logs."""
    for name in TORCHS:
        logging.getLogger(name).removeFilter(_nothing)
    if not verbose:
        # What torch could not trace becomes our own error; its stack would stand before that.
        for name in TORCHS:
            logging.getLogger(name).addFilter(_nothing)
        return
    handler = logging.StreamHandler(screen.err.file)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("tilewright")
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


def _nothing(record: logging.LogRecord) -> bool:
    del record
    return False


def _exit_code(error: TilewrightError) -> int:
    if isinstance(error, UnsupportedError):
        return ExitCode.UNSUPPORTED
    return ExitCode.WRONG_USE if isinstance(error, InputError | ModelError) else ExitCode.FAILED
