"""What is kept on disk is made anew when a file that it depends on has another text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from tests.support.layers import imports, read_package

from tilewright.runtime.store import code_identity as store

EXCUSED = {
    "errors": "decides nothing",
    "options": "is part of the key by its values",
    "allocate": "packs what was decided",
    "arrays": "brings numpy's arrays in",
    "capture": "makes the graph, which is part of the key",
    "plan": "comes after what is remembered",
    "progress": "tells people what is done",
    "runtime": "builds and runs; what it measures has keys of its own",
    "emit": "prints: part of PRINTING",
    "__init__": "names what is public",
}


def room(module: str) -> str:
    """The entry of DECIDING that a module belongs to, or its room."""
    path = module.replace(".", "/")
    return next(
        (r for r in store.DECIDING if path == r.removesuffix(".py") or path.startswith(f"{r}/")),
        module.split(".")[0],
    )


def test_what_deciding_files_import_is_listed_or_excused() -> None:
    sources = read_package()
    deciding = [m for m in sources if room(m) in store.DECIDING]
    used = {other for m in deciding for other, _ in imports(m, sources[m], frozenset(sources))}
    assert not {room(m) for m in used} - set(store.DECIDING) - set(EXCUSED)
    assert set(store.DECIDING) < set(store.PRINTING) and "emit" in store.PRINTING


def test_files_in_folders_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    file = tmp_path / "schedule" / "gpu" / "blocks.py"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("one", "two"):
        file.write_text(text)
        store.code_identity.cache_clear()
        found.append(store.code_identity(("schedule",)))
    assert found[0] != found[1]
    with pytest.raises(AssertionError, match="is not there"):
        store.code_identity(("schedule", "tile"))
    store.code_identity.cache_clear()


def test_a_source_tree_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert store.package_version()
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert store.package_version() == "source"
