"""Whose key seals a file, and which keys are none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.artifact.conftest import KEY, put_key
from tests.support.artifacts import Saved
from torch import nn

import tilewright
from tilewright.artifact.file import container, seals
from tilewright.errors import ArtifactError
from tilewright.options import Options


def refused(path: Path) -> bool:
    """Whether the machine code of a file is not run."""
    try:
        tilewright.load(path, rebuild=False)
    except ArtifactError as error:
        return "vouches" in str(error)
    return False


@pytest.fixture
def path(small: Saved, tmp_path: Path) -> Path:
    """The saved model as a file."""
    (tmp_path / "m.tw").write_bytes(small.data)
    return tmp_path / "m.tw"


def test_a_key_is_made_once_and_for_this_user_alone(key: Path, tmp_path: Path) -> None:
    key.unlink()
    for name in ("a.tw", "b.tw"):
        tilewright.save(tilewright.compile(nn.ReLU(), (torch.ones(3),)), tmp_path / name)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert not refused(tmp_path / "a.tw") and not refused(tmp_path / "b.tw")
    assert [p.name for p in key.parent.iterdir() if "artifact.key" in p.name] == ["artifact.key"]


def test_another_key_seals_nothing_of_ours(path: Path) -> None:
    assert not refused(path)
    put_key(bytes(32))
    assert refused(path)


@pytest.mark.parametrize(
    "what", ["absent", "short", "long", "open to others", "a link", "two names", "a folder", "a pipe"]
)
def test_what_is_no_key_vouches_for_nothing(what: str, path: Path, key: Path) -> None:
    if what == "open to others":
        key.chmod(0o640)
    elif what == "two names":
        os.link(key, key.with_name("other"))
    else:
        key.unlink()
    if what in ("short", "long"):
        put_key(KEY[:31] if what == "short" else KEY + b"x")
    elif what == "a link":
        (key.parent / "real").write_bytes(KEY)
        (key.parent / "real").chmod(0o600)
        key.symlink_to(key.parent / "real")
    elif what == "a folder":
        key.mkdir()
    elif what == "a pipe":
        os.mkfifo(key, 0o600)
    assert refused(path)


def test_where_no_key_can_be_kept_files_have_no_seal(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(seals, "key_path", lambda options: tmp_path / "file" / "key")
    with pytest.warns(RuntimeWarning, match="no key can be kept"):
        tilewright.save(tilewright.compile(nn.ReLU(), (torch.ones(3),)), tmp_path / "a.tw")
    assert container.read(tmp_path / "a.tw").seal == container.NO_SEAL
    assert not seals.is_ours(container.read(tmp_path / "a.tw"), Options.make())
    loaded: Any = tilewright.load(tmp_path / "a.tw", trust=True)
    assert loaded(torch.ones(3)).sum() == 3
