"""A record tells what an artifact is, and a damaged artifact is told from a good one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts.record import Record, describe_files, read_record, sha256_of, verify_files
from raysd.errors import ArtifactError


def make_record(folder: Path, **changes: Any) -> Record:
    facts = {
        "experiment": "tiny",
        "stage": "train",
        "fingerprint": "f" * 32,
        "identity": {"stage": "train", "inputs": {}},
        "section": {},
        "code_version": "0",
        "packages": {},
        "host": {},
        "metrics": {"steps": 3},
        "started": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T00:01:00+00:00",
        "elapsed_s": 60.0,
        "attempt": 1,
        "files": describe_files(folder),
    }
    return Record(**{**facts, **changes})


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345678")
    (folder / "sub" / "b.bin").write_bytes(b"")
    return folder


def test_a_record_reads_back_equal(artifact: Path, tmp_path: Path):
    record = make_record(artifact)
    path = tmp_path / "record.json"
    path.write_text(record.model_dump_json(indent=1))
    assert read_record(path) == record
    assert record.files["a.bin"].size_bytes == 8 and record.files["a.bin"].sha256 == sha256_of(artifact / "a.bin")
    assert sorted(record.files) == ["a.bin", "sub/b.bin"]


def test_no_record_is_none(tmp_path: Path):
    assert read_record(tmp_path / "record.json") is None
    (tmp_path / "file").touch()
    assert read_record(tmp_path / "file" / "record.json") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stage": "train"}', b"\xff\xfe\x00"])
def test_a_broken_record_raises_and_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read_record(path)
    assert caught.value.where == str(path) and "delete" in caught.value.fix


def test_an_unknown_field_or_a_newer_schema_is_not_read_as_if_it_were_known(artifact: Path, tmp_path: Path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**make_record(artifact).model_dump(mode="json"), "extra": 1}))
    with pytest.raises(ArtifactError, match="does not parse"):
        read_record(path)
    path.write_text(make_record(artifact, record_schema=2).model_dump_json())
    with pytest.raises(ArtifactError, match="schema 2"):
        read_record(path)


def test_an_intact_artifact_passes(artifact: Path):
    verify_files(artifact, make_record(artifact))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b"1234"), "4 bytes"),
        (lambda path: path.write_bytes(b"1234567X"), "SHA-256"),
    ],
    ids=["deleted", "cut short", "one byte changed"],
)
def test_a_damaged_file_is_named(artifact: Path, damage, words: str):
    record = make_record(artifact)
    damage(artifact / "a.bin")
    with pytest.raises(ArtifactError, match=words) as caught:
        verify_files(artifact, record)
    assert "a.bin" in caught.value.where and str(artifact) in caught.value.fix
