"""A server that does whatever a test says with each connection, byte for byte: what no web framework would send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator


@contextlib.contextmanager
def byte_server(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Iterator[str]:
    """Its URL; answer: what it does with a connection, in a thread of the server's own."""
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        started.set()
        await asyncio.to_thread(done.wait)
        server.close()

    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        thread.join()
