"""Pieces of unfinished work: found again from another machine, and never when damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.artifacts import Store
from raysd.artifacts.home import Home
from raysd.artifacts.lease import LeaseLostError, lease_key
from tests.artifacts.test_store import FILES, KEY, record_of
from tests.records import write_files


def piece(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "piece"
    path.write_bytes(content)
    return path


def test_a_kept_piece_is_found_by_the_next_attempt_on_another_machine(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), store.work_on(KEY, {}) as work:
        assert work.pieces.find("shard-1") is None
        kept = work.pieces.keep("shard-1", piece(tmp_path, b"one"))
        assert kept.read_bytes() == b"one" and work.pieces.find("shard-1") == kept
        work.pieces.keep("cells/none/1", piece(tmp_path, b"cell"))
        raise KeyboardInterrupt
    with Store(new_home()).work_on(KEY, {}) as work:
        work.clear()
        assert work.pieces.find("shard-1").read_bytes() == b"one" and work.pieces.find("cells/none/1").read_bytes() == b"cell"
        assert work.pieces.find("shard-2") is None and work.pieces.find("shard") is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "its sum flipped", "its sum truncated"])
def test_a_damaged_piece_is_not_found_and_can_be_made_again(store: Store, new_home: Callable[[], Home], tmp_path: Path, damage: str):
    key = f"{KEY.prefix}work/00001/shard-1"
    with store.work_on(KEY, {}) as work:
        work.pieces.keep("shard-1", piece(tmp_path, b"whole"))
        total = store.home.get(f"{key}.sum")
        if damage == "deleted":
            store.home.delete([key])
        elif damage.startswith("its sum"):
            store.home.put(
                f"{key}.sum", total[:-9] if damage.endswith("truncated") else total.replace(b'"size_bytes":5', b'"size_bytes":4')
            )
        else:
            store.home.put(key, {"truncated": b"whol", "flipped": b"whOle"}[damage])
    other = Store(new_home())
    with other.work_on(KEY, {}) as work:
        assert work.pieces.find("shard-1") is None
        work.pieces.keep("shard-1", piece(tmp_path, b"again"))
        assert work.pieces.find("shard-1").read_bytes() == b"again"
    with Store(new_home()).work_on(KEY, {}) as work:
        assert work.pieces.find("shard-1").read_bytes() == b"again"


def test_a_damaged_copy_on_this_machine_does_not_hide_the_piece(store: Store, tmp_path: Path):
    with store.work_on(KEY, {}) as work:
        path = work.pieces.keep("shard-1", piece(tmp_path, b"whole"))
        path.write_bytes(b"whOle")
        found = work.pieces.find("shard-1")
        assert found.read_bytes() == b"whole" if store.home.remote else found is None


def test_a_piece_is_replaced(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    with store.work_on(KEY, {}) as work:
        for content in (b"step 10", b"step 20, longer"):
            work.pieces.keep("checkpoint", piece(tmp_path, content))
            with_other_eyes = Store(new_home()).home.fetch(f"{KEY.prefix}work/00001/checkpoint")
            assert work.pieces.find("checkpoint").read_bytes() == content == with_other_eyes.read_bytes()


def test_pieces_go_when_the_artifact_is_there(store: Store, tmp_path: Path):
    with store.work_on(KEY, {}) as work:
        out = write_files(work.clear(), FILES)
        work.pieces.keep("shard-1", piece(tmp_path, b"one"))
        work.publish(out, record_of(out, work))
    assert store.home.list(f"{KEY.prefix}work/") == [] and not store.home.local(f"{KEY.prefix}work").exists()


def test_nothing_is_kept_for_an_artifact_that_was_taken_over(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    with pytest.raises(LeaseLostError), store.work_on(KEY, {}) as work:
        new_home().put(lease_key(KEY.prefix, 2), b"another run's")
        with pytest.raises(LeaseLostError):
            work.held.check_now()
        work.pieces.keep("shard-1", piece(tmp_path, b"one"))
    assert store.home.list(f"{KEY.prefix}work/") == []
