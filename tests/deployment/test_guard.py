"""Keys and the length of a body, before an application that must not see what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from raysd.deployment.guard import Guard, read_keys
from raysd.errors import ExperimentError

KEYS = ["first-key", "second-key"]


async def application(scope, receive, send) -> None:
    """Answers with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def answer(guard: Guard, path: str = "/v1/completions", headers: dict[str, str] | None = None, pieces: tuple[bytes, ...] = (b"{}",), **scope: Any) -> tuple[int, bytes, int]:
    """Status, body, and how many pieces of the request were read."""
    sent: list[dict] = []
    left = [{"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1} for number, piece in enumerate(pieces)]
    count = len(left)

    async def receive():
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asked = {"type": "http", "method": "POST", "path": path, "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()], **scope}
    asyncio.run(guard(asked, receive, send))
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], b"", count - len(left)
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:]), count - len(left)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "Bearer FIRST-KEY", "Basic first-key", "first-key",
                                    "Bearer first-key,second-key", "Bearer \xff"])
def test_what_is_no_key_is_refused_as_openai_does(header):
    status, body, read = answer(Guard(application, KEYS, 1000), headers={} if header is None else {"Authorization": header})
    assert (status, read) == (401, 0)
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key") and error["message"] and "param" in error
    assert not any(key in body.decode() for key in KEYS)


@pytest.mark.parametrize("header", ["Bearer first-key", "Bearer second-key", "bearer first-key", "Bearer  first-key "])
def test_each_of_the_keys_opens(header):
    assert answer(Guard(application, KEYS, 1000), headers={"Authorization": header})[:2] == (200, b"2")


@pytest.mark.parametrize("path", ["/metrics", "/invocations", "/tokenize", "/v1/models", "/docs", "/reset_prefix_cache", "//v1/models", "/health/", "/healthz"])
def test_every_path_but_health_asks_for_a_key(path):
    assert answer(Guard(application, KEYS, 1000), path)[0] == 401


@pytest.mark.parametrize(("path", "scope"), [("/health", {}), ("/ping", {}), ("/llm/health", {"root_path": "/llm"})])
def test_health_is_open(path, scope):
    assert answer(Guard(application, KEYS, 1000), path, **scope)[0] == 200


def test_a_websocket_asks_for_a_key_too():
    assert answer(Guard(application, KEYS, 1000), "/v1/realtime", type="websocket")[0] == 1008


def test_without_keys_none_is_asked_for():
    assert answer(Guard(application, [], 1000))[0] == 200


@pytest.mark.parametrize(("length", "status"), [("1000", 200), ("1001", 413), ("99999999999999999999", 413), ("-1", 413), ("x", 413), ("", 413)])
def test_a_length_that_is_told_and_too_long_is_refused_unread(length, status):
    told, body, read = answer(Guard(application, [], 1000), headers={"Content-Length": length})
    assert told == status and (status == 200 or read == 0)
    if status == 413:
        assert json.loads(body)["error"]["code"] == "body_too_long"


@pytest.mark.parametrize(("pieces", "status", "read"), [((b"a" * 600, b"a" * 400), 200, 2), ((b"a" * 600, b"a" * 401, b"a"), 413, 2), ((b"a" * 1001, b"a"), 413, 1), ((b"",), 200, 1)])
def test_a_body_whose_length_is_not_told_is_read_as_far_as_it_may_be_long(pieces, status, read):
    told, body, pieces_read = answer(Guard(application, [], 1000), headers={"Transfer-Encoding": "chunked"}, pieces=pieces)
    assert (told, pieces_read) == (status, read)
    if status == 200:
        assert body == str(sum(map(len, pieces))).encode()


def test_other_than_requests_pass():
    seen = []

    async def lifespan(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(Guard(lifespan, KEYS, 1000)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_keys_are_read_from_the_variable():
    assert read_keys("K", {"K": " a1 ,b2,, "}) == ["a1", "b2"] and read_keys(None, {}) == []


@pytest.mark.parametrize(("value", "words"), [(None, "no variable K"), ("", "no variable K"), (" , ", "no variable K"), ("se cret", "cannot carry"), ("sec\nret", "cannot carry"),
                                              ("schlüssel", "cannot carry")])
def test_what_is_no_key_in_the_environment_is_refused_and_not_shown(value, words):
    with pytest.raises(ExperimentError, match=words) as caught:
        read_keys("K", {} if value is None else {"K": value})
    assert caught.value.exit_code == 64 and not (value or "").strip(" ,") or value not in str(caught.value)
