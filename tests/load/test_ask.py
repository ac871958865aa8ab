"""Questions to servers that answer anything but what was asked, byte for byte."""

import asyncio
import contextlib
import json

import pytest

from raysd.cli import main
from raysd.errors import EngineError, ExperimentError, RaysdError
from raysd.load.address import parse_address
from raysd.load.ask import ask_json, served_model
from tests.byte_server import byte_server


@contextlib.contextmanager
def serving(pieces, pause_s=0.0, ends=True):
    """The URL of a server that sends these pieces, each after a pause, to whoever asks something, and then ends the connection, or says nothing any more."""
    asked = []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # whoever asked may have had enough
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if not ends:
                await reader.read()
        writer.close()

    with byte_server(answer) as url:
        yield url, asked


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_an_answer_is_had_by_get_without_a_body_and_by_post_with_one():
    with serving([http(b'{"a": [1]}')]) as (url, asked):
        assert ask_json(parse_address(url, "a key"), "/x") == ask_json(parse_address(f"{url}/llm"), "/y", {"b": 1}) == {"a": [1]}
    assert asked[0].startswith(b"GET /x HTTP/1.1\r\n") and b"authorization: Bearer a key" in asked[0] and asked[1].startswith(b"POST /llm/y ") and b"content-length: 8" in asked[1]


@pytest.mark.parametrize(("pieces", "says"), [
    ([b"SSH-2.0-OpenSSH_9.6\r\n"], "not HTTP"), ([b"220 mail ESMTP\r\n"], "not HTTP"), ([b"\x15\x03\x03\x00\x02\x02\x46"], "not HTTP"), ([b"\x00" * 100], "not HTTP"),
    ([b"HTTP/1.1 abc OK\r\n\r\n"], "not HTTP"), ([b"HTTP/9 200\r\n\r\n"], "not HTTP"), ([b"HTTP/1.1\r\n\r\n"], "not HTTP"), ([], "ended the connection"),
    ([b"HTTP/1.1 200 OK\r\ncontent-le"], "ended the connection"), ([http(b'{"data": []}')[:-3]], "ended the connection"), ([b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n"], "not HTTP"),
    ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{}"], "ended the connection"), ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "not HTTP"),
    ([b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], "another protocol"), ([http(b"", "307 Temporary Redirect")], "answered 307"),
    ([http(b"no such page", "404 Not Found")], "answered 404: no such page"), ([http(b"\xff\xfe")], "not JSON"), ([http(b"[" * 100_000)], "not JSON"), ([http(b"")], "not JSON")])
def test_a_server_that_speaks_something_else_is_an_error_that_says_so(pieces, says, capsys):
    with serving(pieces) as (url, _):
        assert main(["bench", url]) == 1
    told = capsys.readouterr().err
    assert says in told and f"{url}/v1/models" in told and "OpenAI-compatible API" in told and "unexpected" not in told


@pytest.mark.parametrize(("pieces", "ends"), [([b""], False), ([bytes([byte]) for byte in http(b'{"data": [{"id": "m"}]}' + b" " * 200)], True), ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 100, False)])
def test_one_limit_is_for_the_whole_question_however_the_bytes_are_dealt_out(pieces, ends):
    with serving(pieces, pause_s=0.02, ends=ends) as (url, _), pytest.raises(EngineError, match="within 0.3 s"):
        served_model(parse_address(url), None, limit_s=0.3)


@pytest.mark.parametrize("document", [
    None, [], [{"id": "m"}], "data", 7, {}, {"data": None}, {"data": "m"}, {"data": {"id": "m"}}, {"data": [None]}, {"data": ["m"]}, {"data": [{"id": None}]}, {"data": [{}]},
    {"data": [{"id": 3}]}, {"data": [{"id": ""}]}, {"data": [{"id": "a\x1b[2J"}]}, {"data": [{"id": "\ud800"}]}, {"data": [{"id": "m"}, {"id": None}]}, {"error": "not here"}])
@pytest.mark.parametrize("asked", [None, "m"])
def test_what_is_no_list_of_models_is_shown_as_such(document, asked):
    with serving([http(json.dumps(document).encode())]) as (url, _), pytest.raises(ExperimentError, match="no list of models") as refused:
        served_model(parse_address(url), asked)
    assert json.dumps(document) in refused.value.what and url in refused.value.where


@pytest.mark.parametrize("asked", [None, "m"])
def test_a_server_without_a_model_is_told_as_that(asked):
    with serving([http(b'{"data": []}')]) as (url, _), pytest.raises(EngineError, match="has no model") as refused:
        served_model(parse_address(url), asked)
    assert "--model" not in refused.value.where, "there is none to name"


HOSTILE = b"\x1b[2J\x1b[31mowned\r\n\nvalid\n\xe2\x80\xae\xc2\x9b31m"


@pytest.mark.parametrize("answer", [http(HOSTILE, "500 X"), http(HOSTILE), http(json.dumps(HOSTILE.decode()).encode())])
def test_a_server_has_no_say_over_the_terminal(answer, capsys):
    with serving([answer]) as (url, _):
        assert main(["bench", url]) != 0
    told = capsys.readouterr().err
    assert all(line.isprintable() for line in told.split("\n")) and not any(line.startswith("valid") for line in told.split("\n"))


@pytest.mark.parametrize("answer", [http(b"{'bad key': 'sk-very-secret'}", "401 Unauthorized"), http(b'{"you sent": "sk-very-secret"}'), http(b"x" * 480 + b"sk-very-secret", "401 Unauthorized"),
                                    http(b'"%s"' % (b"x" * 480 + b"sk-very-secret"))])
def test_a_key_that_a_server_repeats_is_not_shown(answer):
    with serving([answer]) as (url, _), pytest.raises(RaysdError, match=r"\(the key\)") as refused:
        served_model(parse_address(url, "sk-very-secret"), None)
    assert "sk-very" not in str(refused.value)
