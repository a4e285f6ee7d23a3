"""The kernel cache: whole entries only, whatever dies, fills up, is foreign or runs at the same time."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.child_process import script

from tilewright.errors import BuildError, CacheWarning
from tilewright.options import Options
from tilewright.runtime.store import cache
from tilewright.runtime.store.cache import MANIFEST, ContentStore, default_root, digest

KEY = digest("a kernel")
FILES = {"unit.so": b"\x7fELF machine code", "unit0.cpp": b"int f();"}


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "kernels")


def test_digest_separates_its_parts() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") == digest(b"ab")
    assert len(digest()) == 64


def test_put_and_get(store: ContentStore, tmp_path: Path) -> None:
    assert store.get(KEY) is None
    (tmp_path / "big").write_bytes(b"from a file")
    folder = store.put(KEY, {**FILES, "copied.bin": tmp_path / "big"})
    assert store.get(KEY) == folder
    assert (folder / "unit.so").read_bytes() == FILES["unit.so"]
    assert (folder / "copied.bin").read_bytes() == b"from a file"
    assert ContentStore(store.root).get(KEY) == folder
    assert store.root is not None and store.root.stat().st_mode & 0o777 == 0o700
    assert not list((store.root / "staging").iterdir())


def test_first_entry_stands(store: ContentStore) -> None:
    first = store.put(KEY, FILES)
    assert store.put(KEY, {"unit.so": b"other"}) == first
    assert (first / "unit.so").read_bytes() == FILES["unit.so"]


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "remove", "manifest", "no manifest", "not json", "odd name"]
)
def test_half_an_entry_is_no_entry(store: ContentStore, damage: str) -> None:
    folder = store.put(KEY, FILES)
    unit, manifest = folder / "unit.so", folder / MANIFEST
    if damage == "truncate":
        unit.write_bytes(FILES["unit.so"][:-1])
    elif damage == "flip":
        unit.write_bytes(b"\x7eELF machine code")
    elif damage == "remove":
        unit.unlink()
    elif damage == "manifest":
        manifest.write_text('{"files": []}')
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "not json":
        manifest.write_bytes(b"\xff\x00")
    else:
        manifest.write_text('{"files": {"../../secret": {"sha256": "", "bytes": 0}}}')
    assert store.get(KEY) is None
    assert store.put(KEY, FILES) == folder  # the broken one gives way
    assert store.get(KEY) == folder
    assert (folder / "unit.so").read_bytes() == FILES["unit.so"]


def test_a_file_in_the_way(store: ContentStore) -> None:
    folder = store.put(KEY, FILES)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("not a folder")
    assert store.get(KEY) is None
    assert store.put(KEY, FILES) == folder


@pytest.mark.parametrize("key", ["", "short", "../" + "a" * 40, "A" * 64, "g" * 64])
def test_keys_are_digests(store: ContentStore, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        store.get(key)


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", MANIFEST, "a b"])
def test_names_are_plain(store: ContentStore, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        store.put(KEY, {name: b""})


def test_without_a_root(tmp_path: Path) -> None:
    store = ContentStore(None)
    folder = store.put(KEY, FILES)
    assert store.get(KEY) == folder
    assert (folder / "unit.so").read_bytes() == FILES["unit.so"]
    assert ContentStore(None).get(KEY) is None
    with store.single_flight(KEY):
        pass


def test_default_root(tmp_path: Path) -> None:
    assert default_root(Options(cache=False)) is None
    assert default_root(Options(cache_dir=str(tmp_path))) == tmp_path / "kernels"
    usual = default_root(Options())
    assert usual is not None and usual.is_absolute()


def off_with_one_warning(store: ContentStore, match: str) -> None:
    """The store still gives out entries, from a private place, and warns once."""
    with pytest.warns(CacheWarning, match=match) as seen:
        folder = store.put(KEY, FILES)
        assert store.get(KEY) == folder
        store.put(digest("another"), FILES)
        with store.single_flight(KEY):
            pass
    assert len([w for w in seen if issubclass(w.category, CacheWarning)]) == 1
    assert (folder / "unit.so").read_bytes() == FILES["unit.so"]
    assert store.root is None or store.root not in folder.parents


def test_open_to_others(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    root.mkdir()
    root.chmod(0o777)
    off_with_one_warning(ContentStore(root), "others")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    off_with_one_warning(ContentStore(tmp_path / "link"), "not a directory")


def test_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    off_with_one_warning(ContentStore(tmp_path / "kernels"), "another user")


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    off_with_one_warning(ContentStore(tmp_path / "file" / "kernels"), "hold")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["replace", "fsync", "mkdir", "open"])
def test_file_system_errors(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Any call inside the store's folder fails; outside it, the disk is fine."""
    store.put(digest("before"), FILES)
    real = getattr(os, call)
    opened: set[int] = set()

    def failing(first: object, *args: object, **kwargs: object) -> object:
        inside = first in opened if isinstance(first, int) else str(first).startswith(str(tmp_path))
        if inside and not (call == "open" and args and args[0] == os.O_RDONLY):
            raise OSError(number, os.strerror(number))
        return real(first, *args, **kwargs)

    if call == "fsync":  # the handles that belong to the store
        real_open = os.open

        def watching(path: str, *args: int, **kwargs: object) -> int:
            handle = real_open(path, *args, **kwargs)  # pyright: ignore[reportArgumentType]
            opened.discard(handle)
            if str(path).startswith(str(tmp_path)):
                opened.add(handle)
            return handle

        monkeypatch.setattr(os, "open", watching)
    monkeypatch.setattr(os, call, failing)
    off_with_one_warning(store, "cannot")


def test_unreadable_entry(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, FILES)

    def stale(_: Path) -> bytes:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.warns(CacheWarning, match="read"):
        assert store.get(KEY) is None


def test_no_place_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(cache, "_private_directory", full)
    with pytest.raises(BuildError, match="no space"):
        ContentStore(None).put(KEY, FILES)


def test_old_leftovers_are_removed(store: ContentStore) -> None:
    assert store.root is not None
    store.put(digest("first"), FILES)
    old, new = store.root / "staging" / "old", store.root / "staging" / "new"
    for left in (old, new):
        left.mkdir()
        (left / "file").write_text("")
    os.utime(old, (0, 0))
    ContentStore(store.root).put(KEY, FILES)
    assert not old.exists()
    assert new.exists()


def test_a_large_store_drops_what_is_unused(store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "STORE", replace(cache.STORE, max_bytes=10_000))
    keys = [digest(str(i)) for i in range(6)]
    for age, key in enumerate(keys):
        folder = store.put(key, {"unit.so": bytes(2500)})
        os.utime(folder / MANIFEST, (age + 1, age + 1))
    assert store.get(keys[0]) is not None  # used now
    ContentStore(store.root).put(digest("new"), {"unit.so": b""})
    left = [ContentStore(store.root).get(key) is not None for key in keys]
    assert left == [True, False, False, False, False, True]


def test_single_flight(store: ContentStore) -> None:
    inside: list[int] = []
    most: list[int] = []

    def build() -> None:
        with ContentStore(store.root).single_flight(KEY):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=build) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1] * 8


def test_a_lock_that_is_never_released(store: ContentStore) -> None:
    with store.single_flight(KEY):
        start = time.monotonic()
        with ContentStore(store.root).single_flight(KEY, timeout=0.1):
            assert 0.05 < time.monotonic() - start < 5


def test_failure_inside_a_flight_frees_the_lock(store: ContentStore) -> None:
    with pytest.raises(ZeroDivisionError), store.single_flight(KEY):
        raise ZeroDivisionError
    with store.single_flight(KEY, timeout=0.5):
        pass


WRITER = """
from pathlib import Path
from tilewright.runtime.store.cache import ContentStore, digest
store = ContentStore(Path({root!r}))
print("ready", flush=True)
for i in range(1000000):
    key = digest(str(i % 40))
    with store.single_flight(key):
        if store.get(key) is None or i % 3 == 0:
            store.put(key, {{"unit.so": (key * 2000).encode(), "text": key.encode()}})
"""


def writer(root: Path) -> subprocess.Popen[bytes]:
    text = script(WRITER.format(root=str(root)))
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("rounds", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_killed_writers_leave_whole_entries(tmp_path: Path, rounds: int) -> None:
    """Two writers at a time, killed at random moments: every visible entry is whole, and locks are free again."""
    root = tmp_path / "kernels"
    keys = [digest(str(i)) for i in range(40)]
    chance = random.Random(7)
    for _ in range(rounds):
        writers = [writer(root) for _ in range(2)]
        for w in writers:
            assert w.stdout is not None and w.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.15))
        for w in writers:
            w.send_signal(signal.SIGKILL)
            w.communicate()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store = ContentStore(root)
            for key in keys:
                folder = store.get(key)
                if folder is not None:
                    assert (folder / "unit.so").read_bytes() == (key * 2000).encode()
                assert (root / key[:2] / key).exists() == (folder is not None)  # a rename is all or nothing
                with store.single_flight(key, timeout=1.0):
                    pass
    store.put(keys[0], {"unit.so": b""})
    assert store.get(keys[0]) is not None
