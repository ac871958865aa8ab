"""A record tells what an artifact is, and a damaged artifact is told from a good one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts import ArtifactKey
from raysd.artifacts.record import (
    SCHEMA,
    Record,
    decode_record,
    encode_record,
    is_whole,
    read_record,
    sha256_of,
    verify_files,
)
from raysd.errors import ArtifactError
from tests.records import make_record

METRICS = {"steps": 3, "loss": 1.25, "by_position": {"2": 7, "10": 8}, "name": "caf\u00e9"}


def record_of(folder: Path, **changes: Any) -> Record:
    return make_record(ArtifactKey("tiny", "train", "f" * 32), folder, metrics=METRICS, **changes)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345678")
    (folder / "sub" / "b.bin").write_bytes(b"")
    return folder


def test_a_record_reads_back_equal(artifact: Path, tmp_path: Path):
    record = record_of(artifact)
    (tmp_path / "record.json").write_bytes(encode_record(record))
    assert read_record(tmp_path / record.folder) == record == decode_record(encode_record(record), "here")
    assert record.files["a.bin"].size_bytes == 8 and record.files["a.bin"].sha256 == sha256_of(artifact / "a.bin")
    assert sorted(record.files) == ["a.bin", "sub/b.bin"]


def test_no_record_is_none(tmp_path: Path):
    assert read_record(tmp_path / "files-0123456789ab") is None
    (tmp_path / "file").touch()
    assert read_record(tmp_path / "file" / "files-0123456789ab") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b'{"stage": "train"}', f'{{"record_schema": {SCHEMA}}}'.encode(), b"\xff\xfe\x00", b"[" * 100_000])
def test_a_broken_record_raises_and_is_named(content: bytes):
    with pytest.raises(ArtifactError, match="damaged") as caught:
        decode_record(content, "here/record.json")
    assert caught.value.where == "here/record.json" and "delete" in caught.value.fix


def test_any_digit_or_letter_that_changes_is_seen(artifact: Path):
    content = encode_record(record_of(artifact))
    for at, byte in enumerate(content):
        if chr(byte).isalnum():
            with pytest.raises(ArtifactError):
                decode_record(content[:at] + bytes([byte ^ 1]) + content[at + 1 :], "here")


def test_an_unknown_field_is_not_read_as_if_it_were_known(artifact: Path):
    class Wider(Record):
        extra: int = 1

    with pytest.raises(ArtifactError, match="does not parse"):
        decode_record(encode_record(Wider(**record_of(artifact).model_dump())), "here")


def test_a_newer_schema_asks_for_a_newer_raysd(artifact: Path):
    with pytest.raises(ArtifactError, match=f"schema {SCHEMA + 1}") as caught:
        decode_record(encode_record(record_of(artifact, record_schema=SCHEMA + 1)), "here")
    assert caught.value.fix == "upgrade raysd"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", ".", "a\\b", "a\0b"])
def test_a_file_outside_of_the_artifact_is_refused(artifact: Path, name: str):
    record = record_of(artifact)
    evil = record.model_copy(update={"files": {name: record.files["a.bin"]}})
    with pytest.raises(ArtifactError, match="does not parse"):
        decode_record(encode_record(evil), "here")


def test_an_intact_artifact_passes(artifact: Path):
    record = record_of(artifact)
    verify_files(artifact, record, "here")
    assert all(is_whole(artifact / name, entry) for name, entry in record.files.items())


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
    record = record_of(artifact)
    damage(artifact / "a.bin")
    with pytest.raises(ArtifactError, match=words) as caught:
        verify_files(artifact, record, "here")
    assert caught.value.where == f"here/{record.folder}/a.bin" and "delete here" in caught.value.fix
    assert not is_whole(artifact / "a.bin", record.files["a.bin"])
