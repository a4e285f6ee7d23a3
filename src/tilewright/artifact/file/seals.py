"""Who vouches for machine code: a seal by a key that only this user can read.

The key is 32 random bytes beside the cache, made once, mode 0600. The seal is an HMAC-SHA256 over the head of a file,
which holds the SHA-256 of every section. Without the key nobody can make one; with another user's key none fits.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

import platformdirs

from tilewright.errors import warn
from tilewright.options import Options
from tilewright.tuning.input_limits import ARTIFACTS

from .container import NO_SEAL, Container
from .disk import regular

_NAME = "artifact.key"
_BYTES = 32
_PURPOSE = b"tilewright artifact 1\0"
_USERS_ALONE = 0o600


def seal(head: bytes, options: Options) -> bytes:
    """The seal of a head by this user's key, which is made if there is none; zeros (and a warning) where none can be
    kept."""
    path = key_path(options)
    key = _read_key(path) or _made_key(path)
    if key is None:
        warn(
            f"no key can be kept at {path}: the artifact has no seal, and needs trust=True wherever it is loaded"
        )
        return NO_SEAL
    return hmac.digest(key, _PURPOSE + head, hashlib.sha256)


def is_ours(container: Container, options: Options) -> bool:
    """Whether an artifact was made with this user's key."""
    key = _read_key(key_path(options))
    if key is None or container.seal == NO_SEAL:
        return False
    return hmac.compare_digest(hmac.digest(key, _PURPOSE + container.head, hashlib.sha256), container.seal)


def key_path(options: Options) -> Path:
    """Where the key lies: beside the store of kernels if the options say where that is, else among the user's data."""
    if options.cache_dir is not None:
        return Path(options.cache_dir).expanduser() / _NAME
    return platformdirs.user_data_path("tilewright", appauthor=False) / _NAME


def _read_key(path: Path) -> bytes | None:
    """The key; None if there is none that this user alone can read and could have made."""
    try:
        with regular(path, follow=False) as file:
            found = os.fstat(file.fileno())
            foreign = os.name == "posix" and (
                found.st_uid != os.getuid()
                or found.st_nlink != 1
                or stat.S_IMODE(found.st_mode) & ~_USERS_ALONE
            )
            key = b"" if foreign or found.st_size != _BYTES else file.read(_BYTES)
    except OSError:
        return None
    return key if len(key) == _BYTES else None


def _made_key(path: Path) -> bytes | None:
    """A new key, or the one that another process has made meanwhile; None where none can be written."""
    beside = path.with_name(f".{_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _USERS_ALONE), "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(beside, path)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    deadline = time.monotonic() + ARTIFACTS.max_key_seconds
    while (key := _read_key(path)) is None and time.monotonic() < deadline:
        time.sleep(ARTIFACTS.max_key_seconds / _BYTES)  # another process still has a second name for it
    return key
