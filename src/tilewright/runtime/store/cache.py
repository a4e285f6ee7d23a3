"""The kernel cache: a content-addressed store of small folders, safe for many processes, never the cause of a failure.

An entry is a folder named by its key. It is written under a temporary name, flushed to disk and renamed, with a
manifest of SHA-256 sums; what does not match its manifest is no entry. The store's directory must belong to the user
and be closed to others. Whatever the file system refuses costs one `CacheWarning`; entries then live in a private
temporary directory of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import filelock
import platformdirs

from tilewright.errors import BuildError, CacheWarning, warn
from tilewright.options import Options
from tilewright.tuning.input_limits import STORE

MANIFEST = "manifest.json"
KEY = re.compile(r"[0-9a-f]{16,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def digest(*parts: str | bytes) -> str:
    """Hex SHA-256 of the parts, each with its length before it, so that no two lists of parts run together."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def default_root(options: Options) -> Path | None:
    """Where the store lives under these options; None when caching is switched off."""
    if not options.cache:
        return None
    if options.cache_dir is not None:
        return Path(options.cache_dir).expanduser() / "kernels"
    return platformdirs.user_cache_path("tilewright", appauthor=False) / "kernels"


class ContentStore:
    """A content-addressed store in `root`, or in memory of this process only (`root` None).

    Keys are lower-case hex digests. No method raises for what the file system does, except `put` when not even a
    temporary directory can be written.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._warned = False
        self._swept = False
        self._checked = False
        self._private: dict[str, Path] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Path | None:
        """Folder of the entry, its files checked against their SHA-256; None if there is no whole entry."""
        _check_key(key)
        private = self._private.get(key)
        if private is not None:
            return private
        root = self._usable()
        if root is None:
            return None
        folder = root / key[:2] / key
        try:
            if not _check_files(folder):
                return None
            with contextlib.suppress(OSError):
                os.utime(folder / MANIFEST)  # when it was last used, for `_trim`
            return folder
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn(f"cannot read {folder}: {error}")
            return None

    def put(self, key: str, files: Mapping[str, bytes | Path]) -> Path:
        """Add an entry (bytes, or a file to copy, by name) and return its folder.

        If another process was first, its entry stands. Raises `BuildError` when no directory at all can be written.
        """
        _check_key(key)
        for name in files:
            if not _NAME.fullmatch(name) or name == MANIFEST:
                raise ValueError(f"not a name of a cached file: {name!r}")
        root = self._usable()
        if root is not None:
            try:
                return self._publish(root, key, files)
            except OSError as error:
                self._warn(f"cannot write to {root}: {error}")
        return self._keep_private(key, files)

    def remove(self, key: str) -> None:
        """Take an entry away, if there is one: what it says does not hold."""
        _check_key(key)
        with self._lock:
            self._private.pop(key, None)
        root = self._usable()
        if root is None:
            return
        try:
            staging = root / "staging"
            staging.mkdir(mode=0o700, exist_ok=True)
            move_aside(root / key[:2] / key, staging)
        except OSError as error:
            self._warn(f"cannot write to {root}: {error}")

    @contextlib.contextmanager
    def single_flight(self, key: str, timeout: float = STORE.max_lock_seconds) -> Generator[None]:
        """Hold the key's lock, so that one process builds while the others wait, at most `timeout` seconds.

        After that, or where locks do not work, everybody goes alone: `put` is safe without the lock.
        """
        _check_key(key)
        lock = self._locked(key, timeout)
        try:
            yield
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    lock.release()

    def _locked(self, key: str, timeout: float) -> filelock.BaseFileLock | None:
        root = self._usable()
        if root is None:
            return None
        try:
            folder = root / "locks"
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = filelock.FileLock(folder / f"{key}.lock", timeout=timeout, mode=0o600)
            lock.acquire()
            return lock
        except filelock.Timeout:
            return None
        except (OSError, NotImplementedError) as error:
            self._warn(f"cannot lock in {root}: {error}")
            return None

    def _usable(self) -> Path | None:
        """The root, made if absent and checked once: owned by the user and closed to others. None: caching is off."""
        if self.root is None or self._checked:
            return self.root
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = _not_ours(self.root)
        except OSError as error:
            problem = str(error)
        if problem:
            self._warn(f"{self.root} cannot hold compiled code: {problem}")
            self.root = None
        self._checked = True
        return self.root

    def _publish(self, root: Path, key: str, files: Mapping[str, bytes | Path]) -> Path:
        """Write under a temporary name, flush, rename; a broken entry in the way is moved aside."""
        staging = root / "staging"
        staging.mkdir(mode=0o700, exist_ok=True)
        self._sweep(staging)
        target = root / key[:2] / key
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder = staging / f"{key}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            _write_entry(folder, files)
            for _ in range(3):
                try:
                    os.replace(folder, target)
                    _flush_folder(target.parent)
                    return target
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                if is_complete(target):
                    return target
                move_aside(target, staging)
            raise OSError(errno.EEXIST, "an entry stands in the way", str(target))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self, staging: Path) -> None:
        """Once for each store: remove what killed processes left, and the entries that make it too large."""
        if self._swept:
            return
        self._swept = True
        oldest = time.time() - STORE.max_unfinished_seconds
        _trim(staging.parent, oldest)
        for left in staging.iterdir():
            with contextlib.suppress(OSError):
                if left.lstat().st_mtime < oldest:
                    shutil.rmtree(left, ignore_errors=True)

    def _keep_private(self, key: str, files: Mapping[str, bytes | Path]) -> Path:
        """An entry that lives as long as this process."""
        with self._lock:
            if key in self._private:
                return self._private[key]
            try:
                folder = _private_directory() / f"{key}.{secrets.token_hex(4)}"
                _write_entry(folder, files)
            except OSError as error:
                raise BuildError(
                    f"no directory can hold compiled code: {error}",
                    phase="cache",
                    hint="free some disk space or set TMPDIR",
                ) from error
            self._private[key] = folder
            return folder

    def _warn(self, message: str) -> None:
        """One warning for each store."""
        with self._lock:
            if self._warned:
                return
            self._warned = True
        warn(f"kernel cache: {message}. Compiled kernels are not kept.", CacheWarning)


def _check_key(key: str) -> None:
    if not KEY.fullmatch(key):
        raise ValueError(f"not a cache key: {key!r}")


def _not_ours(folder: Path) -> str:
    """Why a directory is not safe to load code from; empty if it is."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if os.name != "posix":
        return ""
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & 0o077:
        return f"others may enter it (mode {stat.S_IMODE(found.st_mode):o}, 700 is needed)"
    return ""


def _write_entry(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """A folder with the files and, last, their manifest; everything flushed to disk."""
    folder.mkdir(mode=0o700)
    sums: dict[str, dict[str, str | int]] = {}
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        _write_file(folder / name, data)
        sums[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    _write_file(folder / MANIFEST, json.dumps({"files": sums}, sort_keys=True, indent=1).encode())
    _flush_folder(folder)


def _write_file(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_files(folder: Path) -> bool:
    """Whether the manifest is there and every file matches it. Raises `OSError` as the file system does."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, entry in listed.items():
            if not _NAME.fullmatch(name):
                return False
            data = (folder / name).read_bytes()
            if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
                return False
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def is_complete(folder: Path) -> bool:
    """Whether an entry's files are what its manifest says."""
    try:
        return _check_files(folder)
    except OSError:
        return False


def move_aside(path: Path, staging: Path) -> None:
    """Get an entry out of the way at once and remove it."""
    aside = staging / f"broken.{os.getpid()}.{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)


def _trim(root: Path, oldest: float) -> None:
    """Bring a store over `STORE.max_bytes` down to three quarters of it: those unused for longest go first.

    Entries used after `oldest` stay, as another process may be about to load them.
    """
    entries: list[tuple[float, int, Path]] = []
    for folder in root.glob("[0-9a-f][0-9a-f]/*"):
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in folder.iterdir())
            entries.append(((folder / MANIFEST).stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in entries)
    if total <= STORE.max_bytes:
        return
    for used, size, folder in sorted(entries):
        if used >= oldest or total <= STORE.max_bytes * 3 // 4:
            return
        move_aside(folder, root / "staging")
        total -= size


_process_directory: dict[int, Path] = {}


def _private_directory() -> Path:
    """A temporary directory of this process, removed at its end."""
    owner = os.getpid()
    if owner not in _process_directory:
        folder = Path(tempfile.mkdtemp(prefix="tilewright-"))
        _process_directory[owner] = folder
        atexit.register(_remove_private, owner, folder)
    return _process_directory[owner]


def _remove_private(owner: int, folder: Path) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's directory
        shutil.rmtree(folder, ignore_errors=True)
