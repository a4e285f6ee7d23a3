"""Pages of compiled models, and files that they are written to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tilewright.errors import InputError

from .page import page
from .taken import Reported, report_facts, reported


def model_page(
    title: str, compilations: Sequence[object], signature: object, path: str | os.PathLike[str] | None = None
) -> str:
    """The page of a compiled model, also written to a file if a path is given. Raises InputError."""
    return graphs_page(title, reported(compilations, signature), path)


def graphs_page(title: str, graphs: Sequence[Reported], path: str | os.PathLike[str] | None = None) -> str:
    """The same of graphs with titles of their own."""
    text = page(report_facts(title, graphs))
    if path is not None:
        write(path, text)
    return text


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page. Raises InputError where that cannot be done."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the page: {error}", phase="report", place=os.fspath(path)) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise InputError if a file cannot be written there, before there is anything to write."""
    target = Path(path)
    folder = target.parent
    if (
        target.is_dir()
        or not folder.is_dir()
        or not os.access(target if target.exists() else folder, os.W_OK)
    ):
        hint = "name a file in a folder that exists and that you may write to"
        raise InputError("the file cannot be written there", phase="report", place=os.fspath(path), hint=hint)
