"""One small model, saved once, by a key that every test has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import Saved
from tests.support.artifacts import saved as save

from tilewright.artifact.file import seals
from tilewright.options import Options

KEY = bytes(range(32))


def put_key(key: bytes = KEY) -> Path:
    """Write a key where this user's is kept."""
    path = seals.key_path(Options.make())
    path.write_bytes(key)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """The small model, saved."""
    folder = tmp_path_factory.mktemp("artifact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", os.fspath(folder))
        patch.setenv("TILEWRIGHT_MEASURE", "0")
        put_key()
        made = save(folder)
    yield made


@pytest.fixture(autouse=True)
def key(isolated: None) -> Path:
    """This user's key."""
    return put_key()
