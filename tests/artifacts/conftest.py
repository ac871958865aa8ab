"""An empty store in each of the homes, and the same place as another machine sees it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.artifacts.home import Home
from raysd.backends.s3_home import S3Home
from tests.s3_server import s3_endpoint, s3_place

__all__ = ["s3_endpoint", "s3_place"]


@pytest.fixture(params=["folder", "s3"])
def new_home(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Home]:
    """Makes homes over one empty place: each is what another machine sees, with no copies of its own."""
    if request.param == "folder":
        return lambda: FolderHome(tmp_path / "store")
    place = request.getfixturevalue("s3_place")
    return lambda: S3Home(place.section, tmp_path / f"cache-{uuid.uuid4().hex}")


@pytest.fixture
def home(new_home: Callable[[], Home]) -> Home:
    return new_home()


@pytest.fixture
def store(home: Home) -> Store:
    return Store(home)
