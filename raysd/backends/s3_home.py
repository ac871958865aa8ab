"""The home of artifacts in a bucket of S3, or of a server that speaks its protocol (MinIO, Ceph, ...)."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from raysd.artifacts.home import OF_ARTIFACT, Entry, Moved
from raysd.backends.s3_errors import code_and_status, explain, explained
from raysd.errors import ArtifactError, ExperimentError
from raysd.experiment.store import S3Section

ATTEMPTS = 8
"""Of one request, all told. botocore waits longer before each: in all a few seconds after errors, half a minute if asked to slow down."""
ANSWER_S = 20
"""The longest silence before a request is made again: shorter than a lease takes to go stale, since beats wait for answers, too."""
TRANSFER_ANSWER_S = 60
"""Likewise for files: a server may take its time to put parts together."""
CONFLICT_WAITS_S = (0.1, 0.5, 2.0)
"""Before asking again when a server says that two conditional writes met."""
PART_BYTES = 64 << 20
THREADS = 8
"""Parts of one file that are moved at once."""
DELETE_BATCH = 1000
"""As many as the protocol takes in one request."""
FETCHING = ".fetching"
"""Folder for copies that are not whole yet, away from those that are."""
UPLOAD_MARK = "?uploadId="
PROBE_NAME = re.compile(r"\.probe-[0-9a-f]{32}")
"""Of the object by which `check_writable` tries the server."""


class S3Home:
    """Objects below a bucket's prefix (a Home). Threads may share it. Credentials come from boto3's own chain alone."""

    remote = True

    def __init__(self, section: S3Section, cache: Path) -> None:
        """cache: the folder on this machine for copies of this prefix alone."""
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.uri = section.text()
        self._bucket, self._prefix, self._cache = section.bucket, section.prefix, cache
        # Servers older than 2025 refuse the checksums that botocore adds of its own accord since then.
        checksums = (
            {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
            if section.endpoint_url
            else {}
        )
        config = Config(
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            connect_timeout=5,
            read_timeout=ANSWER_S,
            max_pool_connections=4 * THREADS,
            s3={"addressing_style": section.addressing_style},
            **checksums,
        )
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=THREADS, preferred_transfer_client="classic"
        )
        with self._explained("set up boto3"):
            try:
                session = boto3.session.Session()
                self._client, self._files = (
                    session.client("s3", endpoint_url=section.endpoint_url, region_name=section.region, config=each)
                    for each in (config, config.merge(Config(read_timeout=TRANSFER_ANSWER_S)))
                )
            except ValueError as err:  # an endpoint_url, here or in AWS_ENDPOINT_URL, that is none
                raise ExperimentError(
                    what=str(err), where=f"store: {self.uri}", fix="correct endpoint_url, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
                ) from err

    def place(self, key: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def local(self, key: str = "") -> Path:
        return self._cache / key

    @contextlib.contextmanager
    def writing_locally(self, key: str) -> Iterator[None]:
        try:
            self.local(key).parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as err:
            raise ArtifactError(what=f"the copy on this machine cannot be written: {err.strerror}", where=err.filename or self.local(key),
                                fix="free disk space there, or name another folder in RAYSD_CACHE") from err

    def exists(self) -> bool:
        self.now_s()  # raises if there is no such bucket; a prefix needs no making
        return True

    def check_writable(self) -> None:
        probe = f".probe-{uuid.uuid4().hex}"
        self.list(probe)  # first, since without the right to list an absent object is answered by AccessDenied
        try:
            first, second = self.create(probe, b"first"), self.create(probe, b"second")
        finally:
            self.delete([probe])
        if not first or second:
            raise ArtifactError(
                what="the server ignores `If-None-Match: *`: two runs could write the same artifact",
                where=self.place(),
                fix="use a server with conditional writes (AWS, MinIO, Ceph Squid or newer), or a folder",
            )

    def now_s(self) -> float:
        with self._explained("tell the time"):
            headers = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)["ResponseMetadata"]["HTTPHeaders"]
        if "date" not in headers:
            raise ArtifactError(
                what="the server's answers carry no Date, by which leases go stale",
                where=self.place(),
                fix="use another server, or a folder",
            )
        return parsedate_to_datetime(headers["date"]).timestamp()

    def get(self, key: str) -> bytes | None:
        from botocore.exceptions import ChecksumError, FlexibleChecksumError, HTTPClientError, IncompleteReadError

        with self._explained("read", key):
            for again in (True, True, False):
                try:
                    body = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"]
                except self._client.exceptions.NoSuchKey:
                    return None
                try:
                    return body.read()
                except (
                    HTTPClientError,
                    IncompleteReadError,
                    ChecksumError,
                    FlexibleChecksumError,
                ):  # botocore asks again only until the body begins
                    if not again:
                        raise

    def put(self, key: str, content: bytes) -> None:
        with self._explained("write", key):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=content)

    def create(self, key: str, content: bytes) -> bool:
        from botocore.exceptions import ClientError

        with self._explained("create", key):
            for wait_s in (*CONFLICT_WAITS_S, None):
                try:
                    self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=content, IfNoneMatch="*")
                    return True
                except ClientError as err:
                    _, status = code_and_status(err)
                    if status == 412:
                        # botocore asks again when an answer is lost, and then meets the object that it wrote itself.
                        return self.get(key) == content
                    if status == 501:
                        raise ArtifactError(
                            what="the server knows no conditional writes: two runs could write the same artifact",
                            where=self.place(),
                            fix="use a server with `If-None-Match: *` (AWS, MinIO, Ceph Squid or newer), or a folder",
                        ) from err
                    if status != 409 or wait_s is None:
                        raise
                    time.sleep(wait_s)

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        from boto3.exceptions import S3UploadFailedError

        with self.writing_locally(key), self._explained("write", key):
            try:
                self._upload(key, path, moved)
            except S3UploadFailedError as err:
                # Likewise: if the answer to the last request of an upload in parts was lost, that upload is closed by now.
                if not isinstance(err.__context__, self._files.exceptions.NoSuchUpload):
                    raise
                self._upload(key, path, None)
            shutil.move(path, self.local(key))

    def fetch(self, key: str, moved: Moved | None = None) -> Path:
        from botocore.exceptions import ClientError

        path, part = self.local(key), self._cache / FETCHING / uuid.uuid4().hex
        with self.writing_locally(key), self._explained("read", key):
            part.parent.mkdir(exist_ok=True)
            try:
                self._files.download_file(self._bucket, self._prefix + key, str(part), Callback=moved, Config=self._transfer)
                part.replace(path)
            except ClientError as err:
                if code_and_status(err)[1] in (400, 403):
                    self.now_s()  # raises with the reason (say, ExpiredToken), which an answer to HEAD does not carry
                raise
        return path

    def list(self, prefix: str, skipped: list[ArtifactError] | None = None) -> list[Entry]:  # a listing of S3 is answered whole or not at all
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            found = [
                Entry(each["Key"].removeprefix(self._prefix), each["Size"], each["LastModified"].timestamp())
                for page in pages
                for each in page.get("Contents", ())
                if _is_path(each["Key"].removeprefix(self._prefix))
            ]
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Iterable[str]) -> None:
        from botocore.exceptions import ClientError

        keys = list(keys)
        for batch in (keys[start : start + DELETE_BATCH] for start in range(0, len(keys), DELETE_BATCH)):
            objects = [{"Key": self._prefix + key} for key in batch]
            with self._explained("delete from"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            for failed in answer.get("Errors", ()):
                if failed["Code"] != "NoSuchKey":
                    raise explain(
                        ClientError({"Error": failed}, "DeleteObjects"), "delete", f"s3://{self._bucket}/{failed['Key']}", self.uri
                    )
            for key in batch:
                with contextlib.suppress(OSError):  # the copy only takes space
                    self.local(key).unlink()

    def abandoned(self, older_than_s: float) -> list[Entry]:
        until_s = self.now_s() - older_than_s
        return [entry for entry in self.list(".probe-") if PROBE_NAME.fullmatch(entry.key) and entry.modified_s <= until_s] + self._uploads(until_s)

    def forget(self, uploads: Iterable[str]) -> None:
        for each in uploads:
            key, _, upload = each.rpartition(UPLOAD_MARK)
            if PROBE_NAME.fullmatch(each):
                self.delete([each])
                continue
            with self._explained("forget an upload of", key), contextlib.suppress(self._client.exceptions.NoSuchUpload):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._prefix + key, UploadId=upload)

    def _uploads(self, until_s: float) -> list[Entry]:
        """Unfinished uploads of artifacts' files, begun until then. Others than raysd may use the bucket: their uploads are theirs."""
        with self._explained("list the uploads of"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            uploads = [
                (each["Key"].removeprefix(self._prefix), each["UploadId"], each["Initiated"].timestamp())
                for page in pages
                for each in page.get("Uploads", ())
            ]
            return [
                Entry(f"{key}{UPLOAD_MARK}{upload}", self._size_bytes(key, upload), begun_s)
                for key, upload, begun_s in uploads
                if OF_ARTIFACT.fullmatch(key) and begun_s <= until_s
            ]

    def _upload(self, key: str, path: Path, moved: Moved | None) -> None:
        self._files.upload_file(str(path), self._bucket, self._prefix + key, Callback=moved, Config=self._transfer)

    def _size_bytes(self, key: str, upload: str) -> int:
        """Of the parts that an unfinished upload has brought so far."""
        size_bytes = 0
        with contextlib.suppress(self._client.exceptions.NoSuchUpload):  # finished or forgotten since it was listed
            for page in self._client.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=self._prefix + key, UploadId=upload):
                size_bytes += sum(part["Size"] for part in page.get("Parts", ()))
        return size_bytes

    def _explained(self, doing: str, key: str = "") -> contextlib.AbstractContextManager[None]:
        return explained(f"{doing} {self.place(key)}", self.place(key), self.uri)


def _is_path(key: str) -> bool:
    """Whether a key names a file below a folder. A console's "folders" do not, and with `..` it would lead out of the folder of copies."""
    return "\0" not in key and not {"", ".", ".."} & set(key.split("/"))
