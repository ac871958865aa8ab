"""What stands before a replica's HTTP interface: API keys and the length of a body, in the shape of OpenAI's errors. An ASGI middleware without a framework."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from raysd.errors import ExperimentError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/ping")
"""Asked by load balancers, which have no key; they tell nothing but whether the engine lives."""


def read_keys(variable: str | None, environment: Mapping[str, str]) -> list[str]:
    """The API keys in an environment variable, comma-separated; none without a variable. Raises ExperimentError, without their values, for what is no key."""
    if variable is None:
        return []
    keys = [key.strip() for key in environment.get(variable, "").split(",") if key.strip()]
    if not keys:
        raise ExperimentError(what=f"the environment has no variable {variable}, or no key is in it", where="serve.api_keys_env",
                              fix="set it where the replicas run, or remove the field; several keys are separated by commas")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ExperimentError(what=f"a key in {variable} has characters that a header cannot carry", where="serve.api_keys_env",
                              fix="use printable ASCII characters without blanks")
    return keys


class Guard:
    """Asks for one of the keys, if there are any, on every path but health, and refuses a body that is too long without keeping it."""

    def __init__(self, app: App, keys: Sequence[str], max_body_bytes: int) -> None:
        self._app, self._keys, self._max_body_bytes = app, [key.encode() for key in keys], max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and not self._is_open(scope) and not self._has_key(headers.get(b"authorization", b"")):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refuse(send, 401, "No API key, or a wrong one. Send one in the header `Authorization: Bearer KEY`.", "invalid_api_key",
                             [(b"www-authenticate", b"Bearer")])
            return
        if scope["type"] == "http":
            length = headers.get(b"content-length", b"0")
            long = not length.isdigit() or int(length) > self._max_body_bytes
            if not long and b"transfer-encoding" in headers:
                receive, long = await _read_ahead(receive, self._max_body_bytes)
            if long:
                await refuse(send, 413, f"The body is longer than {self._max_body_bytes} bytes.", "body_too_long", [])
                return
        await self._app(scope, receive, send)

    def _has_key(self, header: bytes) -> bool:
        """Takes as long for a wrong key as for a right one."""
        scheme, _, given = header.partition(b" ")
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given.strip())
        return found and scheme.lower() == b"bearer"

    @staticmethod
    def _is_open(scope: Mapping[str, Any]) -> bool:
        return scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS


async def refuse(send: Send, status: int, message: str, code: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Answers with an error as OpenAI's API has it."""
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}).encode()
    await send({"type": "http.response.start", "status": status,
                "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]})
    await send({"type": "http.response.body", "body": body})


async def _read_ahead(receive: Receive, most_bytes: int) -> tuple[Receive, bool]:
    """Reads a body whose length was not told; returns what gives it once more, and whether it is too long."""
    messages: list[Message] = []
    size = 0
    while not messages or messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        if size > most_bytes:
            return receive, True
    ahead = iter(messages)

    async def again() -> Message:
        return next(ahead, None) or await receive()

    return again, False
