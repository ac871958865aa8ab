"""Opens a store by its text: a folder, or `s3://...`."""

from __future__ import annotations

from pathlib import Path

from raysd.artifacts import FolderHome, Store, fingerprint
from raysd.artifacts.cache import cache_folder
from raysd.backends.s3_home import S3Home
from raysd.errors import ExperimentError
from raysd.experiment.store import S3Section, read_store


def open_store(text: str | Path | S3Section) -> Store:
    """The store that a text, a folder or the experiment's section names; nothing is asked of it yet.

    Raises ExperimentError for a text that is neither a folder nor S3, for a path that leads nowhere, and for a folder that is a file;
    ArtifactError if boto3's own configuration is broken.
    """
    try:
        named = read_store(text) if isinstance(text, str) else text
    except ValueError as err:
        raise ExperimentError(what=str(err), where="--store", fix="write a folder, or s3://BUCKET/PREFIX") from err
    if not isinstance(named, S3Section):
        try:
            folder = Path(named).expanduser().resolve()
        except (RuntimeError, OSError) as err:  # a user that does not exist, a link to itself
            raise ExperimentError(what=f"`{named}` is not a usable path: {err}", where="--store", fix="correct the path") from err
        return Store(FolderHome(folder))
    return Store(S3Home(named, cache_folder() / "stores" / fingerprint([named.endpoint_url, named.bucket, named.prefix])))
