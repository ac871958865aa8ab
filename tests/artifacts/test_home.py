"""What both homes promise, asked of a real folder and of a real S3 server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raysd.artifacts.home import Home
from raysd.errors import ArtifactError


def test_what_is_put_is_got_and_replaced(home: Home):
    assert home.get("a/b") is None
    for content in (b"one", b"", b"two"):
        home.put("a/b", content)
        assert home.get("a/b") == content
    assert home.get("a/b/c") is None


def test_of_eight_that_create_exactly_one_does(home: Home):
    contents = [f"number {number}".encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda content: home.create("a/lease", content), contents))
    assert created.count(True) == 1
    assert home.get("a/lease") == contents[created.index(True)]
    assert not home.create("a/lease", b"late") and home.get("a/lease") == contents[created.index(True)]


def test_a_reader_sees_the_old_content_or_the_new(home: Home):
    old, new = b"o" * 50_000, b"n" * 70_000
    home.put("a/b", old)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [home.put("a/b", content) for _ in range(15) for content in (new, old)])
        seen = {home.get("a/b")}
        while not writing.done():
            seen.add(home.get("a/b"))
        writing.result()
    assert seen <= {old, new}


def test_a_file_moves_in_and_is_fetched_elsewhere(home: Home, new_home: Callable[[], Home], tmp_path: Path):
    moved: list[int] = []
    for content in (b"first", b"second one"):
        (tmp_path / "file").write_bytes(content)
        home.put_file("a/b", tmp_path / "file", moved.append)
        assert not (tmp_path / "file").exists() and home.local("a/b").read_bytes() == content and home.get("a/b") == content
        assert new_home().fetch("a/b", moved.append).read_bytes() == content
    assert sum(moved) >= 15
    with pytest.raises(ArtifactError, match="missing") as caught:
        home.fetch("a/absent")
    assert "a/absent" in caught.value.where


def test_a_listing_holds_all_below_a_prefix_in_order(home: Home):
    for key in ("b/2", "b/10/x", "a/lease-00001.json", "a/lease-00001.stop", "a/record.json", "ab"):
        home.put(key, key.encode())
    assert [entry.key for entry in home.list("")] == ["a/lease-00001.json", "a/lease-00001.stop", "a/record.json", "ab", "b/10/x", "b/2"]
    assert [entry.key for entry in home.list("a/")] == ["a/lease-00001.json", "a/lease-00001.stop", "a/record.json"]
    assert [(entry.key, entry.size_bytes) for entry in home.list("a/lease-")] == [("a/lease-00001.json", 18), ("a/lease-00001.stop", 18)]
    assert [entry.key for entry in home.list("b/1")] == ["b/10/x"]
    assert home.list("c/") == [] and home.list("b/3") == []
    assert all(abs(entry.modified_s - home.now_s()) < 30 for entry in home.list(""))


def test_of_what_can_be_read_nothing_is_skipped(home: Home):
    home.put("a/b", b"x")
    skipped: list[ArtifactError] = []
    assert home.list("", skipped) == home.list("") and skipped == []


def test_deleting_leaves_the_rest(home: Home):
    for key in ("a/b/1", "a/b/2", "a/c"):
        home.put(key, b"x")
    home.delete(["a/b/1", "a/b/2", "a/absent", "d/absent"])
    home.delete([])
    assert [entry.key for entry in home.list("")] == ["a/c"]


def test_a_writable_home_is_found_so_and_left_as_it_was(home: Home):
    home.check_writable()
    assert home.list("") == [] and home.abandoned(0) == [] and home.exists()
