"""What is a folder's alone: what the operating system refuses, links, and parts of files that a killed writer leaves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysd.artifacts import FolderHome
from raysd.errors import ArtifactError, ExperimentError

NOBODY = 65534


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A `with` inside of which permissions bind: root, whom none do, is somebody else there. Paths below the working folder are relative."""

    @contextlib.contextmanager
    def as_anybody() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above are root's alone
    return as_anybody


def keys(home: FolderHome, prefix: str = "") -> list[str]:
    return [entry.key for entry in home.list(prefix)]


def test_a_store_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="not a folder"):
        FolderHome(tmp_path / "file")
    with pytest.raises(ExperimentError, match=f"below a file, {tmp_path / 'file'}"):
        FolderHome(tmp_path / "file" / "far" / "below")


def test_it_is_there_once_its_folder_is(tmp_path: Path):
    home = FolderHome(tmp_path / "store")
    assert not home.exists() and home.list("") == [] and home.abandoned(0) == []
    home.put("a/b", b"x")
    assert home.exists()


def test_a_read_only_folder_is_told(tmp_path: Path, bound):
    tmp_path.chmod(0o555)
    with bound(), pytest.raises(ArtifactError, match="cannot be written") as caught:
        FolderHome("store").check_writable()
    assert "writable" in caught.value.fix


def test_links_to_folders_are_followed_without_end_or_repetition(tmp_path: Path):
    home = FolderHome(tmp_path / "store")
    home.put("a/x", b"x")
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    for name in ("y", "deep/z"):
        (tmp_path / "disk" / name).write_bytes(b"yy")
    for link, leads_to in (
        ("store/moved", "disk"),
        ("store/a/b", "disk/deep"),
        ("store/twice", "store/a"),
        ("store/around", "."),
        ("store/a/back", "store"),
        ("disk/home", "store"),
        ("disk/self", "disk"),
        ("store/a/gone", "no/such/folder"),
        ("store/a/loop", "store/a/loop"),
        ("store/a/file", "disk/y"),
    ):
        (tmp_path / link).symlink_to(tmp_path / leads_to)
    assert keys(home) == ["a/b/z", "a/file", "a/x", "moved/y"]
    assert keys(home, "moved/") == ["moved/deep/z", "moved/y"] and keys(home, "mov") == keys(home, "moved/")
    assert keys(home, "twice/") == ["twice/b/z", "twice/file", "twice/x"]
    assert keys(home, "moved/home/") == keys(home, "a/back/") == keys(home, "around/") == []
    home.delete(["moved/y", "a/b/z"])
    assert keys(home) == ["a/x"] and (tmp_path / "store" / "a" / "b").is_symlink()


def test_what_a_link_of_an_attempts_tools_leads_to_is_not_deleted_with_the_attempt(tmp_path: Path):
    home, capture, train = FolderHome(tmp_path), f"tiny/capture/{'a' * 32}/", f"tiny/train/{'b' * 32}/"
    home.put(f"{capture}files/shard", b"x")
    home.put(f"{train}work/attempt-1/out/model", b"x")
    for link in (f"{train}work/attempt-1/data", f"{train}work/attempt-1/out/deep"):
        (tmp_path / link).symlink_to(tmp_path / capture)
    assert keys(home, train) == [f"{train}work/attempt-1/out/model"]
    home.delete(keys(home, train))
    assert keys(home) == [f"{capture}files/shard"]


def test_what_cannot_be_read_is_skipped_on_request_and_else_raised(tmp_path: Path, bound):
    home = FolderHome("store")
    for key in ("a/1", "b/c/2", "d/3"):
        home.put(key, b"x")
    (tmp_path / "store" / "e").symlink_to(tmp_path / "store" / "b" / "c")
    locked = tmp_path / "store" / "b"
    locked.chmod(0o000)
    try:
        with bound():
            skipped: list[ArtifactError] = []
            assert [entry.key for entry in home.list("", skipped)] == ["a/1", "d/3"]
            assert sorted(error.where for error in skipped) == ["store/b", "store/e"] and "readable" in skipped[0].fix
            with pytest.raises(ArtifactError, match="cannot be read: Permission denied") as caught:
                home.list("")
            assert caught.value.where in ("store/b", "store/e")
            with pytest.raises(ArtifactError) as caught:
                home.list("b/", skipped)  # nothing of what was asked for
            assert caught.value.where == "store/b" and len(skipped) == 2
            assert home.abandoned(0) == []
    finally:
        locked.chmod(0o755)


PLACES = {  # a place, whether reading there finds nothing or is refused, and what is said of writing
    "below a file": ("file/b/c", "absent", "Not a directory"),
    "a name too long": (f"a/{'x' * 300}", "refused", "File name too long"),
    "a folder": ("folder", "refused", "Is a directory"),
    "below a link to itself": ("loop/b", "absent", "File exists"),
    "below a link that leads nowhere": ("gone/b", "absent", "File exists"),
    "below a locked folder": ("locked/b", "refused", "Permission denied"),
    "in a read-only folder": ("read_only/b", "absent", "Permission denied"),
}


@pytest.mark.parametrize(("key", "reading", "writing"), PLACES.values(), ids=list(PLACES))
def test_what_the_system_refuses_is_told_with_its_place(tmp_path: Path, bound, key: str, reading: str, writing: str):
    store = tmp_path / "store"
    for name in ("folder/below", "locked", "read_only"):
        (store / name).mkdir(parents=True)
    for folder in (tmp_path, store):
        folder.chmod(0o777)
    (store / "file").touch()
    (store / "loop").symlink_to("loop")
    (store / "gone").symlink_to("no/such/folder")
    (tmp_path / "new").touch()
    if os.geteuid() == 0:
        os.chown(tmp_path / "new", NOBODY, NOBODY)
    home = FolderHome("store")
    (store / "read_only").chmod(0o555)
    (store / "locked").chmod(0o000)
    try:
        with bound():
            for write in (home.put, lambda key, content: home.put_file(key, Path("new"))):
                with pytest.raises(ArtifactError, match=f"cannot be written: {writing}") as caught:
                    write(key, b"x")
                assert caught.value.where.startswith(f"store/{key.partition('/')[0]}") and caught.value.fix
            if key == "folder":
                assert not home.create(key, b"x")
            else:
                with pytest.raises(ArtifactError, match=f"cannot be written: {writing}"):
                    home.create(key, b"x")
            if reading == "refused":
                with pytest.raises(ArtifactError, match="cannot be read") as caught:
                    home.get(key)
                assert caught.value.where == f"store/{key}"
                with pytest.raises(ArtifactError, match="cannot be written"):
                    home.delete([key])
            else:
                assert home.get(key) is None
            with pytest.raises(ArtifactError, match="missing|cannot be read") as caught:
                home.fetch(key)
            assert caught.value.where == f"store/{key}"
    finally:
        (store / "locked").chmod(0o755)


def test_what_lies_below_a_file_is_absent_already_when_it_is_deleted(tmp_path: Path):
    home = FolderHome(tmp_path)
    home.put("a", b"x")
    home.delete(["a/b/c", "a/b"])
    assert keys(home) == ["a"]


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


def test_only_parts_of_raysd_are_hidden_and_forgotten(tmp_path: Path):
    home = FolderHome(tmp_path)
    foreign = ["a/.b.0123456789AB.part", "a/.b.0123456789abc.part", "a/b.0123456789ab.part", "a/b.part", "download.part"]
    for key in foreign:
        home.put(key, b"theirs")
    (tmp_path / "a" / ".b.0123456789ab.part").write_bytes(b"ours")
    assert keys(home) == foreign
    assert [entry.key for entry in home.abandoned(0)] == ["a/.b.0123456789ab.part"]


def test_a_probe_that_is_killed_leaves_what_is_forgotten(tmp_path: Path):
    killed = """
import os, sys
from raysd.artifacts import FolderHome

def link_and_die(*names):
    link(*names)
    os._exit(9)

link, os.link = os.link, link_and_die
FolderHome(sys.argv[1]).check_writable()
"""
    assert subprocess.run([sys.executable, "-c", killed, tmp_path]).returncode == 9
    home = FolderHome(tmp_path)
    left = [entry.key for entry in home.abandoned(0)]
    assert len(left) == 2 and home.list("") == []
    home.forget(left)
    assert list(tmp_path.iterdir()) == []


def test_deleting_takes_empty_folders_along(tmp_path: Path):
    home = FolderHome(tmp_path / "store")
    home.put("a/b/c/d", b"x")
    home.put("a/e", b"x")
    home.delete(["a/b/c/d"])
    assert not (tmp_path / "store" / "a" / "b").exists() and home.get("a/e") == b"x"
    home.delete(["a/e"])
    assert list((tmp_path / "store").iterdir()) == []


def test_a_folder_that_is_deleted_before_the_first_file_is_in_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, mkdir, gone = FolderHome(tmp_path / "store"), Path.mkdir, []

    def unlucky(path: Path, *arguments: object, **options: object) -> None:
        mkdir(path, *arguments, **options)
        if path.name == "b" and len(gone) < 2:
            gone.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", unlucky)
    assert home.create("a/b/c", b"x") and home.get("a/b/c") == b"x" and len(gone) == 2


def test_a_link_whose_answer_was_lost_is_still_the_one_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, link = FolderHome(tmp_path), os.link

    def asked_again(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # as an NFS client does that has no answer

    monkeypatch.setattr(os, "link", asked_again)
    assert home.create("a", b"mine") and home.get("a") == b"mine"
    monkeypatch.setattr(os, "link", link)
    assert not home.create("a", b"another's") and home.get("a") == b"mine"


def test_a_user_without_a_home_is_told_to_name_a_cache(tmp_path: Path):
    code = "import os\nfrom raysd.artifacts.cache import cache_folder\nif os.geteuid() == 0: os.setuid(54321)\ncache_folder()"
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "RAYSD_CACHE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    if os.geteuid() == 0:
        assert done.returncode != 0 and "ExperimentError" in done.stderr and "RAYSD_CACHE" in done.stderr
    else:
        assert done.returncode == 0
