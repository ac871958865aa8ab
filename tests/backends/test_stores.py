"""A store opens by its text: a folder, or S3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.artifacts import FolderHome
from raysd.backends.s3_home import S3Home
from raysd.backends.stores import open_store
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from tests.s3_server import S3Place


def test_a_folder_is_absolute_whatever_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for text in ("runs", "./runs", Path("runs"), str(tmp_path / "runs")):
        home = open_store(text).home
        assert isinstance(home, FolderHome) and home.uri == str(tmp_path / "runs")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/runs").uri == str(tmp_path / "runs")


def test_s3_opens_by_text_and_by_section_with_a_cache_for_each_place(s3_place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYSD_CACHE", str(tmp_path))
    by_section, by_text = open_store(s3_place.section), open_store(s3_place.section.text())
    assert isinstance(by_text.home, S3Home) and by_text.uri == by_section.uri == s3_place.section.text()
    by_section.home.put("a/b", b"x")
    assert by_text.home.fetch("a/b").read_bytes() == b"x"
    elsewhere = open_store(s3_place.section.model_copy(update={"uri": f"{s3_place.section.uri}/below"}))
    assert by_text.home.local() == by_section.home.local() != elsewhere.home.local()
    assert {store.home.local().parent for store in (by_text, elsewhere)} == {tmp_path / "stores"}


@pytest.mark.parametrize(
    "text",
    ["", "  ", "\t", "~no-such-user-0f3a/x", "s3:bucket", "s3://", "s3://b?region=x", "gs://bucket/x", "https://host/x", "s3://bucket/../x", "s3://bucket/x?colour=red"],
)
def test_what_is_no_store_is_refused(text: str):
    with pytest.raises(ExperimentError) as caught:
        open_store(text)
    assert caught.value.where == "--store" and caught.value.exit_code == 64


def test_a_link_to_itself_is_no_store(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    for text in (str(tmp_path / "loop"), tmp_path / "loop" / "runs"):
        with pytest.raises(ExperimentError, match="not a usable path") as caught:
            open_store(text)
        assert caught.value.exit_code == 64 and str(text) in caught.value.what


@pytest.mark.parametrize("text", ["", "  ", "~no-such-user-0f3a/x", "loop/runs"])
def test_a_store_that_an_experiment_cannot_mean_is_refused_with_file_and_field(tmp_path: Path, write_experiment: Callable[..., Path], text: str):
    (tmp_path / "loop").symlink_to("loop")
    path = write_experiment(store=text)
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert caught.value.where == f"{path}: store" and caught.value.exit_code == 64


def test_a_folder_of_an_experiment_may_have_any_name(tmp_path: Path, write_experiment: Callable[..., Path]):
    assert open_store(load_experiment(write_experiment(store="./odd://runs")).store).uri == str(tmp_path / "odd:" / "runs")


def test_a_file_is_no_store(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="not a folder"):
        open_store(str(tmp_path / "file"))
