"""The client against a loopback server that misbehaves on demand: faults cannot be made to happen at will in a real one."""

import asyncio
import datetime
import ipaddress
import json
import re
import ssl
import threading
import time

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from raysd.load import run as load_run
from raysd.load.address import parse_address
from raysd.load.arrivals import Load, Part
from raysd.load.metrics import ttft_ms
from raysd.load.requests import Request
from raysd.load.run import Limits, run_load
from raysd.load.selftest import mock_server
from raysd.load.tally import Tally

PROMPT_TOKENS = 3
HANG, SLOW, MUTE, STALE, REPEAT, REFUSES, BREAKS = 1, 11, 12, 13, 14, 15, 16
HOSTILE = "\x1b[2Jowned\r\n\nvalid\n\u202e"


class Loopback:
    """Answers `/v1/completions` in chunks; the prompt's first token says how: 0 well, HANG not, SLOW with a pause, MUTE by the end of the connection, STALE likewise
    if the connection was used before, REPEAT with the key that it was sent, REFUSES and BREAKS with what a terminal would obey, others with a fault."""

    def __init__(self):
        self.in_flight = self.most_in_flight = 0
        self.connections = set()
        self.bodies = []
        self.keys = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        peer = request.transport.get_extra_info("peername")
        if body["prompt"][0] == MUTE or body["prompt"][0] == STALE and peer in self.connections:
            request.transport.abort()
            return web.Response()
        self.connections.add(peer)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.answer(request, body)
        finally:
            self.in_flight -= 1

    async def answer(self, request, body):
        kind = body["prompt"][0]
        if kind == 2:
            return web.Response(status=500, text="the engine is dead")
        if kind == 3:
            return web.Response(status=429, text="slow down")
        if kind == REPEAT:
            return web.Response(status=401, text=f"a bad key: {request.headers['authorization']}")
        if kind == REFUSES:
            return web.Response(status=500, text=HOSTILE)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.02)
        await self.send(response, [10, 11, 12])
        if kind == HANG:
            await asyncio.sleep(30)
        if kind == SLOW:
            await asyncio.sleep(0.5)
        if kind == 4:
            request.transport.abort()
            return response
        if kind == 5:
            await response.write(b"data: {not json}\n\n")
        if kind == BREAKS:
            await response.write(b"data: " + json.dumps({"error": HOSTILE}, ensure_ascii=False).encode() + b"\n\ndata: " + HOSTILE.encode())
        if kind == 6:
            await response.write(b'data: {"error": {"message": "out of blocks"}}\n\n')
        if kind == 7:
            return response  # ends without [DONE]
        if kind == 8:
            await response.write(b"<html>gateway</html>\n\n")
        await asyncio.sleep(0.02)
        last = b"data: " + json.dumps({"choices": [{"index": 0, "token_ids": [13], "finish_reason": "length"}]}).encode() + b"\n\n"
        await response.write(last[:20])  # an event may be cut anywhere
        await asyncio.sleep(0.02)
        await response.write(last[20:])
        counted = 9 if kind == 9 else 4
        if kind != 10:
            await response.write(f'data: {{"choices": [], "usage": {{"prompt_tokens": {PROMPT_TOKENS}, "completion_tokens": {counted}}}}}\n\n'.encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response, token_ids):
        await response.write(b": keep-alive\n\ndata: " + json.dumps({"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": None}]}).encode() + b"\n\n")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A file with key and certificate of 127.0.0.1, which nobody vouches for but itself."""
    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")]), datetime.datetime.now(datetime.UTC)
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1)).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False).sign(key, hashes.SHA256()))
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()) + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def loopback(request):
    """The server; over TLS if the test is parametrised with True."""
    server, loop, started, address = Loopback(), asyncio.new_event_loop(), threading.Event(), []
    tls = None
    if getattr(request, "param", False):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(request.getfixturevalue("certificate"))

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        address.append(runner.addresses[0][1])
        started.set()
        return runner

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{address[0]}"
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(40)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def requests(kinds):
    return [Request(f"p{index}", (kind, 2, 3), max_tokens=4, temperature=0, ignore_eos=False) for index, kind in enumerate(kinds)]


FIVE_SECONDS = Limits(request_s=5)


def ask(url, kinds, concurrency, limits=FIVE_SECONDS):
    return run_load(parse_address(url), "target", requests(kinds), Load(concurrency=concurrency), limits).results


def test_tokens_counts_and_times_are_what_the_server_sent(loopback):
    [result] = ask(loopback.url, [SLOW], 1)
    assert result.error is None and result.prompt_id == "p0"
    assert result.token_ids == (10, 11, 12, 13) and result.chunk_tokens == (3, 1)
    assert (result.prompt_tokens, result.output_tokens, result.finish_reason) == (3, 4, "length")
    assert result.dispatched_ns < result.chunk_ns[0] < result.chunk_ns[1] <= result.ended_ns
    assert 20 <= ttft_ms(result) < 500
    assert 250 < (result.chunk_ns[1] - result.chunk_ns[0]) / 1e6 < 1500
    [body] = loopback.bodies
    assert body["prompt"] == [SLOW, 2, 3] and body["stream"] is True and body["model"] == "target"


def test_exactly_the_asked_concurrency_is_in_flight_on_as_many_connections(loopback):
    results = ask(loopback.url, [0] * 24, 6)
    assert [result.prompt_id for result in results] == [f"p{i}" for i in range(24)]
    assert all(result.error is None for result in results)
    assert loopback.most_in_flight == 6 and len(loopback.connections) == 6


@pytest.mark.parametrize(("kind", "error"), [
    (2, "status 500: the engine is dead"), (3, "status 429"), (4, "connection failed"), (5, "not JSON"), (6, "out of blocks"),
    (7, "ended before"), (8, "not a server-sent event"), (9, "counts 9 output tokens, the chunks hold 4"), (10, "no usage")])
def test_a_fault_is_the_error_of_its_request_and_of_no_other(loopback, kind, error):
    results = ask(loopback.url, [0, kind, 0, 0], 2)
    assert error in results[1].error
    assert results[1].output_tokens == 0 and results[1].token_ids == ()
    assert [result.error for index, result in enumerate(results) if index != 1] == [None] * 3


def test_a_server_that_hangs_does_not_hang_the_client(loopback):
    results = ask(loopback.url, [HANG, 0], 2, Limits(request_s=0.5))
    assert results[0].error == "not answered within 0.5 s" and results[1].error is None


@pytest.mark.parametrize(("kind", "error"), [(4, "connection failed"), (MUTE, "connection failed"), (HANG, "not answered within 0.5 s")])
def test_a_fault_on_a_connection_that_was_used_before_is_one_too_and_is_not_asked_twice(loopback, kind, error):
    results = ask(loopback.url, [0, kind, 0], 1, Limits(request_s=0.5))
    assert error in results[1].error and results[0].error is results[2].error is None
    assert len(loopback.bodies) == 3


def test_a_connection_that_its_server_ends_after_a_pause_is_made_anew(loopback, monkeypatch):
    monkeypatch.setattr(load_run, "STALE_S", 0.0)
    results = ask(loopback.url, [0, STALE], 1)
    assert [result.error for result in results] == [None, None] and results[1].connect_ms is not None and len(loopback.bodies) == 3


@pytest.mark.parametrize("loopback", [True], indirect=True)
def test_a_server_may_speak_tls_and_must_then_be_vouched_for(loopback, certificate, monkeypatch):
    [refused] = ask(loopback.url, [0], 1)
    assert "certificate verify failed" in refused.error.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    results = ask(loopback.url, [0] * 4, 2)
    assert [result.error for result in results] == [None] * 4 and {result.token_ids for result in results} == {(10, 11, 12, 13)}


def test_a_server_that_is_not_there_is_an_error_of_each_request():
    results = ask("http://127.0.0.1:9", [0, 0], 2)
    assert all("connection failed" in result.error for result in results)


def test_a_load_keeps_a_tally_of_itself(loopback):
    tally = Tally()
    run = run_load(parse_address(loopback.url), "target", requests([0, 2, HANG, 4, 0]), Load(concurrency=2), Limits(request_s=1), tally=tally)
    assert tally == Tally(requests=5, ended=5, failed=3, in_flight=0) and sum(result.error is not None for result in run.results) == 3


def test_a_server_that_speaks_no_tls_is_an_error_that_says_something():
    with mock_server() as address:
        [result] = ask(address.url.replace("http:", "https:"), [0], 1)
    assert re.search(r"connection failed: \w+", result.error)


def test_no_requests_give_no_results(loopback):
    assert ask(loopback.url, [], 4) == []


def test_a_server_that_falls_silent_is_given_up_before_the_limit_of_a_request(loopback):
    results = ask(loopback.url, [HANG, 0], 2, Limits(request_s=60, silence_s=0.5))
    assert results[0].error == "nothing was heard for 0.5 s" and results[1].error is None


def test_connections_are_used_again_and_only_the_first_requests_make_one(loopback):
    results = ask(loopback.url, [0] * 6, 2)
    assert sum(result.connect_ms is not None for result in results) == 2 == len(loopback.connections)


def test_an_open_loop_sends_when_it_is_time_whether_or_not_it_was_answered(loopback):
    run = run_load(parse_address(loopback.url), "target", requests([SLOW] * 8), Load(rate_s=20), FIVE_SECONDS)
    assert all(result.error is None for result in run.results) and loopback.most_in_flight == 8
    intended = [result.intended_ns for result in run.results]
    assert [round((at - intended[0]) / 1e6) for at in intended] == [50 * index for index in range(8)]
    assert all(result.dispatched_ns >= result.intended_ns for result in run.results)


def test_a_ramp_reaches_the_concurrency_step_by_step(loopback):
    run = run_load(parse_address(loopback.url), "target", requests([SLOW] * 4), Load(concurrency=4, ramp_s=0.4), FIVE_SECONDS)
    intended = [result.intended_ns for result in run.results]
    assert [round((at - intended[0]) / 1e6) for at in intended] == [0, 100, 200, 300]


@pytest.mark.parametrize("part", [lambda load: load, lambda load: Part(load, 0, 2)])
def test_a_load_ends_when_all_is_answered_however_long_its_ramp(loopback, part):
    run = run_load(parse_address(loopback.url), "target", requests([0] * 4), part(Load(concurrency=8, ramp_s=400)), FIVE_SECONDS)
    assert [result.error for result in run.results] == [None] * 4 and run.health.elapsed_s < 40, "the second slot begins after 50 s, and one of another process before"


def test_processes_that_begin_at_one_moment_send_what_one_would(loopback):
    begin_ns = time.perf_counter_ns() + 200_000_000
    parts = [run_load(parse_address(loopback.url), "target", requests([0] * 4), Part(Load(rate_s=20), number, 2), FIVE_SECONDS, begin_ns=begin_ns) for number in range(2)]
    assert [[round((result.intended_ns - begin_ns) / 1e6) for result in run.results] for run in parts] == [[0, 100, 200, 300], [50, 150, 250, 350]]
    assert all(result.dispatched_ns >= result.intended_ns for run in parts for result in run.results)


def test_the_client_says_how_it_kept_up(loopback):
    health = run_load(parse_address(loopback.url), "target", requests([0] * 4), Load(concurrency=2)).health
    assert health.chunks == 8 and 0 < health.cpu_s < health.elapsed_s and health.cpu_us_per_chunk > 0 and health.loop_lag_ms_p99 >= 0


def test_a_key_goes_with_every_request_and_what_only_vllm_knows_stays_away_from_others(loopback):
    run_load(parse_address(loopback.url, "secret"), "target", requests([0]), Load(concurrency=1), plain=True)
    [body] = loopback.bodies
    assert loopback.keys == ["Bearer secret"] and "return_token_ids" not in body and body["stream_options"] == {"include_usage": True}


def test_a_key_that_a_server_repeats_is_not_in_the_result(loopback):
    [result] = run_load(parse_address(loopback.url, "sk-secret-key"), "target", requests([REPEAT]), Load(concurrency=1)).results
    assert result.error == "status 401: a bad key: Bearer (the key)"


def test_a_fault_is_told_on_one_line_that_leaves_a_terminal_alone(loopback):
    refused, broken = ask(loopback.url, [REFUSES, BREAKS], 1)
    assert refused.error == r"status 500: \x1b[2Jowned\r\n\nvalid\n\u202e" and broken.error.isprintable() and "owned" in broken.error
