"""A server that answers at a pace which is known, for the self-test of the load generator: `python -m raysd.load.mock_server --help`.

It speaks enough of OpenAI's API, streams several tokens a chunk as an engine with a draft does, counts like vLLM, and says at `/truth` when it really wrote each
chunk: a timer may be late, and what a client recovers is compared with what happened, not with what was planned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import httptools
import uvloop

MODEL = "mock"


class Engine:
    """What all connections share: the pace, and what was counted."""

    def __init__(self, ttft_ms: float, step_ms: float, step_tokens: list[int]) -> None:
        """step_tokens: of one verify step after the other, from the start again when they run out; at most k + 1 each."""
        self.ttft_s, self.step_s, self.step_tokens = ttft_ms / 1e3, step_ms / 1e3, step_tokens
        self.running = self.drafts = self.accepted = 0
        self.truth: list[dict[str, Any]] = []
        self.started_s = time.time()

    def metrics(self) -> str:
        k = max(self.step_tokens) - 1
        return "".join(f"{name} {value}\n" for name, value in (
            ("vllm:num_requests_running", self.running), ("vllm:num_requests_waiting", 0), ("vllm:spec_decode_num_drafts_total", self.drafts),
            ("vllm:spec_decode_num_draft_tokens_total", self.drafts * k), ("vllm:spec_decode_num_accepted_tokens_total", self.accepted),
            ("process_start_time_seconds", self.started_s)))


class Connection(asyncio.Protocol):
    """One client's connection, kept alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._parser, self._body, self._url = engine, httptools.HttpRequestParser(self), b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received_ns = time.perf_counter_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.decode("latin-1")
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._task = asyncio.get_running_loop().create_task(self._answer(path.endswith("chat/completions"), self._received_ns))
        elif path == "/v1/models":
            self._reply(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        elif path == "/truth":
            self._reply(json.dumps(self._engine.truth))
        elif path == "/metrics":
            self._reply(self._engine.metrics())
        else:
            self._reply("" if path == "/health" else "there is nothing here", "200 OK" if path == "/health" else "404 Not Found")

    def _reply(self, text: str, status: str = "200 OK") -> None:
        body = text.encode("utf-8")
        self._transport.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode("latin-1") + body)

    async def _answer(self, chat: bool, received_ns: int) -> None:
        engine = self._engine
        asked = json.loads(self._body)
        if asked.get("model") != MODEL:
            return self._reply(json.dumps({"error": {"message": f"The model `{asked.get('model')}` does not exist.", "code": 404}}), "404 Not Found")
        wanted, prompt = asked["max_tokens"], asked["prompt"] if "prompt" in asked else " ".join(message["content"] for message in asked["messages"])
        words = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": words, "completion_tokens": 0, "total_tokens": words}
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        loop, engine.running = asyncio.get_running_loop(), engine.running + 1
        begun_s = loop.time()
        wrote_ns, tokens = [], []
        try:
            while sum(tokens) < wanted:
                steps = len(tokens)
                await asyncio.sleep(begun_s + engine.ttft_s + steps * engine.step_s - loop.time())
                new = min(1 if steps == 0 else engine.step_tokens[steps % len(engine.step_tokens)], wanted - sum(tokens))
                tokens.append(new)
                usage["completion_tokens"] = sum(tokens)
                usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
                text = "".join(f" word{number}" for number in range(sum(tokens) - new, sum(tokens)))  # answers that repeat themselves are none
                choice = {"index": 0, "logprobs": None, "finish_reason": "length" if sum(tokens) == wanted else None, **({"delta": {"content": text}} if chat else {"text": text})}
                if self._transport.is_closing():
                    return None
                wrote_ns.append(time.perf_counter_ns())
                self._chunk({"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": MODEL, "choices": [choice], "usage": usage})
                if steps:
                    engine.drafts += 1
                    engine.accepted += new - 1
        finally:
            engine.running -= 1
        engine.truth.append({"ttft_ms": (wrote_ns[0] - received_ns) / 1e6, "tpot_ms": (wrote_ns[-1] - wrote_ns[0]) / 1e6 / max(1, wanted - 1), "steps": len(tokens) - 1, "tokens": wanted})
        self._chunk({"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": MODEL, "choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")
        return None

    def _chunk(self, content: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(content).encode("utf-8") + b"\n\n")

    def _write(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


async def serve(engine: Engine, port: int) -> None:
    """Serves for ever on loopback; says the port on standard output when it does."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m raysd.load.mock_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="of loopback; default: a free one, which it prints")
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--step-tokens", default="4,1,3,2", help="tokens of each verify step, in turn; default: %(default)s, an acceptance length of 2.5")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Engine(args.ttft_ms, args.step_ms, [int(tokens) for tokens in args.step_tokens.split(",")]), args.port))


if __name__ == "__main__":
    main()
