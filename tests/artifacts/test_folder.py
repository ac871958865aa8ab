"""What is a folder's alone: what the operating system refuses, and parts of files that a killed writer leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysd.artifacts import FolderHome
from raysd.errors import ArtifactError, ExperimentError


def test_a_store_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="not a folder"):
        FolderHome(tmp_path / "file")
    with pytest.raises(ArtifactError, match="cannot be written") as caught:
        FolderHome(tmp_path / "file" / "below").check_writable()
    assert str(tmp_path / "file") in caught.value.where


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_told(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArtifactError, match="cannot be written") as caught:
        FolderHome(tmp_path / "store").check_writable()
    assert "writable" in caught.value.fix


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = FolderHome(tmp_path)
    home.put("a/b", b"old")
    write_full = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **named: write_full(Path("/dev/full") if path.suffix == ".part" else path, *rest, **named)
    )
    for write in (home.put, home.create):
        with pytest.raises(ArtifactError, match="No space left on device") as caught:
            write("a/b", b"new")
        assert "free disk space" in caught.value.fix
    assert home.get("a/b") == b"old" and [entry.key for entry in home.list("")] == ["a/b"] and home.abandoned(0) == []


def test_a_part_that_a_killed_writer_left_counts_for_nothing_and_is_forgotten(tmp_path: Path):
    home = FolderHome(tmp_path)
    home.put("a/record.json", b"{}")
    (tmp_path / "a" / ".record.json.0123456789ab.part").write_bytes(b"half")
    os.utime(tmp_path / "a" / ".record.json.0123456789ab.part", (0, home.now_s() - 100))
    assert [entry.key for entry in home.list("")] == ["a/record.json"]
    assert home.abandoned(200) == []
    (left,) = home.abandoned(50)
    assert left.size_bytes == 4
    home.forget([left.key])
    assert home.abandoned(0) == [] and home.get("a/record.json") == b"{}"


def test_deleting_takes_empty_folders_along(tmp_path: Path):
    home = FolderHome(tmp_path / "store")
    home.put("a/b/c/d", b"x")
    home.put("a/e", b"x")
    home.delete(["a/b/c/d"])
    assert not (tmp_path / "store" / "a" / "b").exists() and home.get("a/e") == b"x"
    home.delete(["a/e"])
    assert list((tmp_path / "store").iterdir()) == []
