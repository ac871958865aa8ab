"""`store:` where artifacts go: a folder, or a bucket of S3 or of a server that speaks its protocol."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import Field, ValidationError

from raysd.experiment.section import Placement, Section

FORM = "write a folder, or s3://BUCKET/PREFIX, with ?endpoint_url=URL&region=NAME&addressing_style=path for other servers than AWS"


class S3Section(Section):
    """Credentials come from boto3's own chain alone: environment, profile, instance role."""

    uri: Placement[str]
    """`s3://BUCKET/PREFIX`."""
    endpoint_url: Placement[str | None] = Field(None, pattern=r"^https?://[^/\s@]+/?$")
    """The server, `http://HOST:PORT`, for MinIO, Ceph and their like; null: boto3's own choice (AWS_ENDPOINT_URL_S3, a profile, or AWS)."""
    region: Placement[str | None] = Field(None, pattern="^[a-z0-9-]+$")
    """The bucket's region; null: boto3's own choice."""
    addressing_style: Placement[Literal["auto", "path", "virtual"]] = "auto"
    """How requests name the bucket: in the `path`, as most servers other than AWS need it, or in the host name (`virtual`)."""

    @property
    def bucket(self) -> str:
        return urlsplit(self.uri).netloc

    @property
    def prefix(self) -> str:
        """What all keys start with: empty, or ending with `/`."""
        path = "/".join(part for part in urlsplit(self.uri).path.split("/") if part)
        return f"{path}/" if path else ""

    def text(self) -> str:
        """The store as `--store` takes it: the settings as a query."""
        given = {name: getattr(self, name) for name in ("endpoint_url", "region") if getattr(self, name) is not None}
        if self.addressing_style != "auto":
            given["addressing_style"] = self.addressing_style
        return self.uri + (f"?{urlencode(given, safe=':/')}" if given else "")


def read_store(store: str | dict[str, Any]) -> str | S3Section:
    """A folder's path as it is, or the S3 that a text or a mapping names. Raises ValueError, naming what is wrong, for anything else."""
    if isinstance(store, str) and not store.startswith("s3:"):
        if not store.strip() or "\0" in store or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", store):
            raise ValueError(f"`{store}` is neither a folder nor S3; {FORM}")
        return store
    try:
        section = S3Section(**_from_text(store)) if isinstance(store, str) else S3Section(**store)
    except ValidationError as err:
        problem = err.errors()[0]
        raise ValueError(f"{problem['loc'][0]}: {problem.get('input')!r}: {problem['msg']}") from None
    if not re.fullmatch(r"s3://[^?#]*", section.uri):
        raise ValueError(f"uri: `{section.uri}` is not s3://BUCKET/PREFIX")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]", section.bucket):
        raise ValueError(f"`{section.bucket}` is not a bucket's name; {FORM}")
    if not all(re.fullmatch(r"[A-Za-z0-9._=+@-]+", part) and part not in (".", "..") for part in section.prefix.split("/")[:-1]):
        raise ValueError(f"`{section.prefix}` is not a prefix of plain names (letters, digits, . _ = + @ -)")
    return section


def _from_text(text: str) -> dict[str, str]:
    uri, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as err:
        raise ValueError(f"`{text}`: {err}; {FORM}") from None
    return {"uri": uri, **dict(pairs)}
