"""The verbs and their own arguments. Heavy imports wait until a verb runs, so that --help is quick."""

from __future__ import annotations

import sys
from typing import Any

import click

from .arguments import Verb, plain_verb, verb
from .request import CommandRequest, ExitCode
from .show import OWN_PROCESS, Screen, say

__all__ = ["OWN_PROCESS", "cli"]


class _Group(click.Group):
    """Lists the verbs in the order of use."""

    command_class = Verb

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each verb with its whole first sentence, however narrow the terminal."""
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As of any group; wrong use is told in one line, with a hint, as every other error is."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            sys.exit(super().main(*args, standalone_mode=False, **extra))
        except click.ClickException as error:
            if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # of click 8.2 on
                click.echo(error.format_message(), err=True)
                sys.exit(error.exit_code)
            verb_of = getattr(error, "ctx", None)
            path = "tilewright" if verb_of is None else verb_of.command_path.replace("cli", "tilewright", 1)
            text = " ".join(error.format_message().split()).rstrip(".")
            end = "" if text.endswith("?") else "."
            say(f"error: {text}{end} Hint: `{path} --help`", "red")
            sys.exit(error.exit_code)
        except OSError as error:  # of a stream: what a verb prints is told by its screen
            if error.filename is not None:
                raise
            if not isinstance(error, BrokenPipeError):
                say(f"error: [cli] stdout cannot be written: {error.strerror}. Hint: make room there", "red")
            sys.exit(ExitCode.FAILED if isinstance(error, BrokenPipeError) else ExitCode.WRONG_USE)
        except click.Abort:  # outside of a verb, which keeps what it found
            say("interrupted", "yellow")
            sys.exit(ExitCode.INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tilewright")
def cli() -> None:
    """Compile PyTorch and ONNX models into faster ones.

    MODEL is an .onnx file, package.module:function returning (module, example_inputs), or a .tw file that `compile
    MODEL -o FILE.tw` made.

    Exit codes: 0 done, 1 error, 2 wrong use, 3 unsupported, 4 failed check, 130 interrupted.

    Completion of verbs, options and files, for bash (zsh and fish likewise):

    eval "$(_TILEWRIGHT_COMPLETE=bash_source tilewright)"
    """


@cli.command(
    "inspect",
    examples=("tilewright inspect model.onnx", "tilewright inspect pkg.mod:make --dim x:0=batch --json -"),
)
@verb
def inspect_(request: CommandRequest) -> int:
    """Show MODEL's inputs, outputs, dims and ops, and which ops would be kernels. Builds nothing."""
    from . import inspect

    return inspect.inspect_model(request)


@cli.command(
    "compile",
    examples=(
        "tilewright compile model.onnx",
        "tilewright compile model.onnx --shape x=1x3x640x640 --threads 2",
        "tilewright compile pkg.mod:make --dim 'x:0=batch[1..64]' --json out.json",
        "tilewright compile model.onnx -o model.tw; tilewright run model.tw",
        "tilewright compile model.onnx -o model.tw --target sm_80,sm_90,x86-64-v3",
    ),
)
@click.option(
    "-o", "--output", metavar="FILE.tw", help="Keep what was compiled there; every verb takes it as MODEL."
)
@click.option(
    "--weights", type=click.Choice(["inside", "beside"]), default="inside", show_default=True,
    help="Where -o keeps weights: in the file, or beside it as safetensors.",
)  # fmt: skip
@click.option(
    "--target", metavar="NAME,NAME",
    help="With -o: machines to make code for, which need not be here. [default: this one]",
)  # fmt: skip
@verb
def compile_(request: CommandRequest, output: str | None, weights: str, target: str | None) -> int:
    """Compile MODEL and show its coverage and the time of each phase, to the end of a first run."""
    from . import work

    targets = tuple(filter(None, (target or "").replace(" ", "").split(",")))
    return work.compile_model(request, output, weights, targets)


@cli.command(
    "run",
    examples=("tilewright run model.onnx --input x=@x.npy --save outputs", "tilewright run pkg.mod:make"),
)
@click.option("--save", metavar="FOLDER", help="Write each output there as a .npy file.")
@verb
def run_(request: CommandRequest, save: str | None) -> int:
    """Compile MODEL, run it once, and summarise its outputs."""
    from . import work

    return work.run_model(request, save)


@cli.command(
    "bench",
    examples=(
        "tilewright bench model.onnx --shape x=1x3x640x640 --against eager,inductor,onnxruntime",
        "tilewright bench pkg.mod:make --precision fp16 --device cuda --seconds 5",
        "tilewright bench pkg.mod:make --dim x:0=batch --over batch=1,2,4,8 --html bench.html",
    ),
)
@click.option(
    "--against",
    default="eager",
    show_default=True,
    metavar="NAMES",
    help="Of eager,inductor,onnxruntime; or none.",
)
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.0),
    help="How long each contestant is timed.",
)
@click.option(
    "--over",
    metavar="DIM=A,B,C",
    help="Throughput at these sizes of a dim that --dim or the file names, too.",
)
@click.option("--html", metavar="FILE", help="Write a page with plots of latencies and throughput.")
@click.option("--md", "markdown", metavar="FILE", help="Write the tables as Markdown.")
@verb
def bench_(request: CommandRequest, **asked: Any) -> int:
    """Time MODEL beside its peers, taking turns with pauses."""
    from . import bench

    return bench.bench_model(request, bench.BenchPlan(**asked))


@cli.command(
    "tune",
    examples=(
        "tilewright tune model.onnx --budget 60s",
        "tilewright tune pkg.mod:make --device cuda --precision fp16 --budget 5m -o tuning.json",
        "TILEWRIGHT_TUNING_FILE=tuning.json tilewright run model.onnx",
    ),
)
@click.option(
    "--budget", default="60s", show_default=True, metavar="TIME", help="About so long: 60s, 5m, 1h."
)
@click.option(
    "-o", "--output", default="tuning.json", show_default=True, metavar="FILE",
    help="Written there; what a file holds already of this version is taken, kept and added to.",
)  # fmt: skip
@verb
def tune_(request: CommandRequest, budget: str, output: str) -> int:
    """Time the ways to compute MODEL on this device, and write which are fastest. Who compiles with the file (option
    tuning_file) times nothing again."""
    from . import tune

    return tune.tune_model(request, output, budget)


@cli.command(
    "check",
    examples=(
        "tilewright check model.onnx",
        "tilewright check model.onnx --against onnxruntime",
        "tilewright check pkg.mod:make --backward",
        "tilewright check pkg.mod:make --bisect --reproduction wrong.py",
    ),
)
@click.option(
    "-k", type=click.FloatRange(0.0), help="Errors allowed, in units of eager's own. [default: 2; half 3]"
)
@click.option(
    "--backward", is_flag=True, help="A training step: its loss, gradients, buffers and whatever it writes."
)
@click.option("--bisect", is_flag=True, help="Find the kernel, call or rewrite that makes it wrong.")
@click.option(
    "--reproduction",
    default="wrong.py",
    show_default=True,
    metavar="FILE",
    help="The program that --bisect writes.",
)
@click.option(
    "--against", default="none", show_default=True, metavar="NAMES",
    help="Of onnxruntime,inductor: judge these by the same rule.",
)  # fmt: skip
@verb
def check_(request: CommandRequest, **asked: Any) -> int:
    """Compare MODEL's outputs with float64, beside eager's own error. Exit code 4 if they are worse."""
    from .checking import check

    return check.check_model(request, check.CheckPlan(**asked))


@cli.command(
    "explain",
    examples=(
        "tilewright explain model.onnx",
        "tilewright explain model.onnx --all --time --shape x=1x3x640x640",
        "tilewright explain pkg.mod:make --source > kernels.cpp",
    ),
)
@click.option("--all", "everything", is_flag=True, help="Every kernel and call, not the ten that cost most.")
@click.option("--time", "timed", is_flag=True, help="Measure each kernel and call too (CPU).")
@click.option("--source", is_flag=True, help="Print each kernel's source too.")
@verb
def explain_(request: CommandRequest, everything: bool, timed: bool, source: bool) -> int:
    """Show what MODEL runs, in order: its share of the time, its bytes, and why each kernel ends there."""
    from . import explain

    return explain.explain_model(request, everything=everything, timed=timed, source=source)


@cli.command(
    "report",
    examples=(
        "tilewright report model.onnx -o report.html",
        "tilewright report pkg.mod:make --json before.json",
        "tilewright report pkg.mod:make --against before.json",
    ),
)
@click.option(
    "-o", "--output", default="report.html", show_default=True, metavar="FILE", help="The page, one file."
)
@click.option(
    "--time/--no-time", "timed", default=True, help="Measure each kernel and call too (CPU).  [default: time]"
)
@click.option("--against", metavar="FILE", help="Compare with an earlier run, which --json wrote.")
@verb
def report_(request: CommandRequest, output: str, timed: bool, against: str | None) -> int:
    """Write what `explain` shows, and more, as one HTML page that opens offline. MODEL may be the JSON of a report."""
    from . import explain

    return explain.report_model(request, output=output, timed=timed, against=against)


@cli.command("env", examples=("tilewright env", "tilewright env --json environment.json"))
@plain_verb
def env_(screen: Screen) -> int:
    """Show what code is made with: compiler, instruction set, devices, versions, cache."""
    from . import machine

    return machine.show_environment(screen)


@cli.command(
    "cache",
    examples=(
        "tilewright cache",
        "tilewright cache list",
        "tilewright cache verify",
        "tilewright cache clear",
    ),
)
@click.argument("action", type=click.Choice(["size", "list", "verify", "clear"]), default="size")
@plain_verb
def cache_(screen: Screen, action: str) -> int:
    """Show, list, verify or clear the kernel cache. `verify` exits with 4 where an entry is broken."""
    from . import machine

    return machine.use_cache(screen, action)


@cli.command("help", examples=("tilewright help", "tilewright help run"))
@click.argument("name", metavar="[VERB]", required=False)
@click.pass_context
def help_(ctx: click.Context, name: str | None) -> None:
    """Show what VERB takes, as `VERB --help` does; without one, the verbs."""
    group = ctx.find_root()
    if name is None:
        click.echo(group.get_help())
        return
    _, command, _ = cli.resolve_command(group, [name])
    if command is not None:  # an unknown one was refused
        click.echo(command.get_help(click.Context(command, group, name)))
