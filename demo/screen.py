"""What the demo shows while it works: a bar and a table that grow on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Screen:
    """`say` names the next step; `show` is what stands above it from now on, in the place of what stood there."""

    say: Callable[[str], None]
    show: Callable[[RenderableType], None]


@contextmanager
def screen(console: Console, steps: int) -> Generator[Screen]:
    """A screen for so many steps. Where there is no terminal, nothing is shown that would be shown again."""
    if not console.is_terminal:
        yield Screen(
            lambda text: console.print(f".. {text}", style="dim", highlight=False), lambda shown: None
        )
        return
    columns = (SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=console)
    task = bar.add_task("starting", total=steps)
    with Live(bar, console=console, transient=True) as live:
        yield Screen(
            lambda text: bar.update(task, description=text, advance=1),
            lambda shown: live.update(Group(shown, bar)),
        )
