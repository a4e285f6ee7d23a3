"""The command line: `tilewright VERB MODEL`."""

from tilewright.cli.command import main

__all__ = ["main"]
