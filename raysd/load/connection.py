"""One HTTP/1.1 connection that stays open: sends a request, and keeps what comes with the time at which it came; nothing is parsed but the framing."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import httptools

from raysd.load.address import Address


@dataclass
class Response:
    """What has come of one answer."""

    status: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    """Arrival (`perf_counter_ns`) and content of each piece of its body."""
    ended_ns: int = 0


class UnheardError(ConnectionError):
    """The connection ended before the server said a word to what was sent."""


class Connection(asyncio.Protocol):
    """One request at a time. Made by `connect`; of no use any more once `closed`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._ended: asyncio.Future[Response] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._keeps = self._framed = True
        self._heard = False
        self.closed = False
        self.now_ns = 0
        """When it last heard of the server, or sent."""

    def send(self, path: str, body: bytes | None, accept: str = "text/event-stream") -> tuple[int, asyncio.Future[Response]]:
        """When it was sent, a POST if there is a body, and the future of its whole answer. Raises through the future: UnheardError if the connection ends before any
        of it, ConnectionError if it ends before all of it, or what the server sends is not HTTP."""
        of_body = {} if body is None else {"content-type": "application/json", "content-length": str(len(body))}
        headers = {"host": self._address.authority, "accept": accept, **of_body, **self._address.headers()}
        head = f"{'GET' if body is None else 'POST'} {self._address.prefix}{path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        self._response, self._parser = Response(), httptools.HttpResponseParser(self)
        self._ended, self._heard = asyncio.get_running_loop().create_future(), False
        message = head.encode("ascii") + (body or b"")
        sent_ns = time.perf_counter_ns()
        self.now_ns = sent_ns
        self._transport.write(message)
        return sent_ns, self._ended

    def close(self) -> None:
        """Ends it at once; an answer that is still coming is lost, and its future raises."""
        self.closed = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError("it was closed"))
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.now_ns = time.perf_counter_ns()
        self._heard = True
        if self._parser is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            self._fail(ConnectionError(f"what the server sends is not HTTP: {err}"))
        except httptools.HttpParserUpgrade:
            self._fail(ConnectionError("the server changes to another protocol, which nobody asked for"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._ended is not None and not self._ended.done():
            if self._response.status and not self._framed and error is None:  # then the end of the connection is the answer's
                self.on_message_complete()
            else:
                self._fail((ConnectionError if self._heard else UnheardError)(f"the server ended the connection{f': {error}' if error else ''}"))

    # What the HTTP parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_message_begin(self) -> None:
        self._framed = False

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        self._keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._response.reads.append((self.now_ns, body))

    def on_message_complete(self) -> None:
        if self._response.status < 200:  # the answer is still to come
            self._response.status, self._framed = 0, True
            return
        self._response.ended_ns = self.now_ns
        self._parser = None
        if not self._ended.done():
            self._ended.set_result(self._response)
        if not self._keeps:
            self.close()

    def _fail(self, error: ConnectionError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()


async def connect(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> Connection:
    """A new connection. tls: the address's context, which takes long to make. Raises OSError or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(address), address.host, address.port, ssl=tls)
    return connection


def reason(error: OSError) -> str:
    """What an error of a connection says; its kind if it says nothing, as asyncio's do when a TLS handshake is broken off."""
    return str(error) or type(error).__name__
