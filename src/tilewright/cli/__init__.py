"""The command line: `tilewright VERB MODEL`."""

from .command import main

__all__ = ["main"]
