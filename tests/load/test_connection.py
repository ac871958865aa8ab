"""Answers as they may be framed, byte for byte: what a web framework would not send."""

import asyncio

import pytest

from raysd.load.address import parse_address
from raysd.load.arrivals import Load
from raysd.load.requests import Request
from raysd.load.run import Limits, run_load
from tests.byte_server import byte_server

EVENTS = b'data: {"choices": [{"token_ids": [7, 8], "finish_reason": "stop"}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
LENGTH = b"content-length: %d\r\n\r\n" % len(EVENTS)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (50, EVENTS[:50], len(EVENTS) - 50, EVENTS[50:])


def answered(pieces, ends, requests=1):
    """What the client makes of a server that sends these pieces to each request, and then ends the connection or not."""
    async def answer(reader, writer):
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    with byte_server(answer) as url:
        asked = [Request(f"q{number}", "p", 2, 0.0, False) for number in range(requests)]
        return run_load(parse_address(url), "m", asked, Load(concurrency=1), Limits(request_s=5)).results


@pytest.mark.parametrize(("pieces", "ends"), [
    ([b"HTTP/1.1 200 OK\r\n" + CHUNKED], False), ([bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\n" + CHUNKED], False), ([b"HTTP/1.1 200 OK\r\n" + LENGTH, EVENTS], False),
    ([b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + CHUNKED], True), ([b"HTTP/1.1 200 OK\r\n\r\n", EVENTS], True), ([b"HTTP/1.0 200 OK\r\n\r\n", EVENTS], True),
    ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + CHUNKED], False), ([b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\n" + LENGTH + EVENTS], False)])
def test_an_answer_is_read_however_it_is_framed(pieces, ends):
    results = answered(pieces, ends, requests=2)
    assert [(result.error, result.token_ids) for result in results] == [(None, (7, 8))] * 2
    assert (results[1].connect_ms is None) == (not ends), "a connection that stays is used again"


@pytest.mark.parametrize(("pieces", "says"), [
    ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"), ([b"HTTP/1.1 200 OK\r\n" + CHUNKED[:-5]], "ended the connection"), ([b"HTTP/1.1 200 OK\r\n" + LENGTH + EVENTS[:-1]], "ended the connection"),
    ([b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS[:-20]], "malformed answer"), ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "not HTTP"), ([], "ended the connection"),
    ([b"HTTP/1.1 100 Continue\r\n\r\n"], "ended the connection"), ([b"HTTP/1.1 204 No Content\r\n\r\n"], "status 204")])
def test_what_is_no_whole_answer_is_an_error(pieces, says):
    [result] = answered(pieces, ends=True)
    assert says in result.error
