"""S3 for tests, over HTTP: a server of moto's in its own process, or whatever server the environment names, and a proxy that makes it fail.

RAYSD_TEST_S3_ENDPOINT and RAYSD_TEST_S3_BUCKET, with credentials in the usual AWS_* variables, name another server: the tests then
write below random prefixes of that bucket, and delete them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from raysd.experiment.store import S3Section

ENDPOINT = os.environ.get("RAYSD_TEST_S3_ENDPOINT")
START_S = 60
MOTO_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class S3Place:
    """An empty place on a real server, this test's own."""

    section: S3Section
    client: Any
    """boto3's, to do to the objects what raysd does not."""

    def at(self, endpoint_url: str) -> S3Section:
        """The same place as another address (a proxy's) reaches it."""
        return self.section.model_copy(update={"endpoint_url": endpoint_url})


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running server."""
    if ENDPOINT:
        yield ENDPOINT
        return
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as endpoint:
        yield endpoint


@pytest.fixture
def s3_place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Place]:
    """An empty place, with credentials in the environment of this process and of those that it starts."""
    if not ENDPOINT:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in MOTO_ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
    client = client_of(s3_endpoint)
    bucket = os.environ["RAYSD_TEST_S3_BUCKET"] if ENDPOINT else f"raysd-{uuid.uuid4().hex}"
    prefix = f"test-{uuid.uuid4().hex}"
    if not ENDPOINT:
        client.create_bucket(Bucket=bucket)
    try:
        yield S3Place(S3Section(uri=f"s3://{bucket}/{prefix}", endpoint_url=s3_endpoint, addressing_style="path"), client)
    finally:
        for upload in client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                client.delete_object(Bucket=bucket, Key=entry["Key"])


@functools.cache
def client_of(endpoint: str) -> Any:
    import boto3

    return boto3.session.Session().client("s3", endpoint_url=endpoint)


@contextlib.contextmanager
def moto_server(log: Path) -> Iterator[str]:
    """A server of moto's for as long as the `with` lasts; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        endpoint, until_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until_s, f"moto does not start: {log.read_text()[-2000:]}"
                time.sleep(0.05)
        yield endpoint
    finally:
        process.terminate()
        process.wait(10)


Fault = str
"""One of CODES: the server says so, and does nothing. `slow`: it does its work DELAY_S later. `reset`: the connection breaks before it
heard anything. `lost`: it did its work, and the connection breaks before the answer. `cut`: the connection breaks in the middle of an
upload. `short`: it did its work, and the connection breaks in the middle of the answer."""
FAULTS: tuple[Fault, ...] = ("500", "503", "slow", "reset", "lost", "cut", "short")
CODES = {"404": "NoSuchUpload", "500": "InternalError", "501": "NotImplemented", "503": "ServiceUnavailable"}
DELAY_S = 0.3
Plan = Callable[[str, str], Fault | None]
"""From a request's method and path to what goes wrong with it."""


def seeded(seed: int, share: float = 0.3, faults: tuple[Fault, ...] = FAULTS) -> Plan:
    """A plan by which a share of all requests goes wrong, the same ones for the same seed and order of requests."""
    dice = random.Random(seed)
    return lambda method, path: dice.choice(faults) if dice.random() < share else None


def once(fault: Fault, method: str, part: str) -> Plan:
    """A plan by which the first request of a method goes wrong whose path, with its query, holds a text."""
    left = [fault]
    return lambda wanted, path: left.pop() if left and wanted == method and part in path else None


class FaultyProxy:
    """An HTTP proxy on this machine before a server, for as long as its `with` lasts: a request goes on to the server, or wrong as planned.

    One request a connection, and it says so (`Connection: close`), so that a fault is that of one request alone.
    """

    def __init__(self, server: str, plan: Plan | None = None, forgets: tuple[str, ...] = ()) -> None:
        """forgets: headers that do not get through, as if the server were too old to know them."""
        address = urlsplit(server)
        self._tls = address.scheme == "https"
        self._host, self._port = address.hostname, address.port or (443 if self._tls else 80)
        self._dropped = ("expect", "connection", *forgets)
        self.plan = plan
        """May be replaced at any time; None: nothing goes wrong."""
        self.done: Counter[str] = Counter()
        """How often each fault was done; `ok` counts the requests that went through."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result(10)
        self.endpoint = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._listener.close()
        serving = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the client went away
            await self._one_request(reader, writer)
        writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = request.split(" ", 2)
        headers = {line.partition(":")[0].strip().lower(): line.partition(":")[2].strip() for line in lines}
        fault = self.plan(method, path) if self.plan else None
        self.done[fault or "ok"] += 1
        if fault == "reset":
            return _reset(writer)
        if headers.get("expect", "").lower() == "100-continue":
            # The client holds its upload back until it is asked for; the proxy asks in the server's place, and forwards no Expect.
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault == "cut":
            await reader.readexactly(int(headers.get("content-length", "0")) // 2)
            return _reset(writer)
        body = await _body(reader, headers)
        if fault in CODES:
            answer = f"<Error><Code>{CODES[fault]}</Code><Message>made to fail</Message></Error>".encode()
            head = [
                f"HTTP/1.1 {fault} Failed",
                "Content-Type: application/xml",
                f"Content-Length: {len(answer)}",
                "Connection: close",
                "",
                "",
            ]
            writer.write("\r\n".join(head).encode("latin-1"))
            writer.write(b"" if method == "HEAD" else answer)
            return await writer.drain()
        if fault == "slow":
            await asyncio.sleep(DELAY_S)
        kept = [line for line in lines if line.partition(":")[0].strip().lower() not in self._dropped]
        answer = await self._ask("\r\n".join([request, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
        if fault == "lost":
            return _reset(writer)
        if fault == "short":
            answer = answer[: -max(1, len(answer.partition(b"\r\n\r\n")[2]) // 2)]
        writer.write(answer)
        await writer.drain()

    async def _ask(self, request: bytes) -> bytes:
        """The server's whole answer, marked as the last one of its connection."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            writer.write(request)
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"keep-alive:"))]
        return b"\r\n".join([*lines, b"Connection: close", b"", body])


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """A request's body as it is on the wire."""
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        return await reader.readexactly(int(headers.get("content-length", "0")))
    chunks = b""
    while True:
        size = await reader.readline()
        chunk = await reader.readexactly(int(size.partition(b";")[0], 16) + 2)
        chunks += size + chunk
        if chunk == b"\r\n":
            return chunks


def _reset(writer: asyncio.StreamWriter) -> None:
    """Breaks a connection: the other side gets a reset, not an end of file."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
