"""Engines that answer at a known pace without computing anything, so that cores do not bind: `python -m tests.mock_engines PORT K STEP_MS HOST`.

With a draft every second step of a request accepts all k tokens. Every arm says the same tokens, for a prompt and its length.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from aiohttp import web

from raysd.backends.vllm_server import VllmServer, free_port
from raysd.load.address import Address
from raysd.sweep.engine import EngineSpec

STEP_MS = 20.0
KEY = os.environ.get("VLLM_API_KEY")


def launch(spec: EngineSpec, log_path: Path, host: str = "127.0.0.1", api_key: str | None = None) -> VllmServer:
    """A Launch: a server whose process is a mock engine."""
    address = Address(host, free_port(host), api_key=api_key)
    return VllmServer(spec, log_path, address, [sys.executable, "-m", "tests.mock_engines", str(address.port), str(spec.k or 0), str(STEP_MS), host])


class Engine:
    """Counts as vLLM does."""

    def __init__(self, k: int, step_s: float) -> None:
        self.k, self.step_s, self.running, self.drafts, self.accepted = k, step_s, 0, 0, 0
        self.started_s = time.time()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        values = {"vllm:num_requests_running": self.running, "vllm:num_requests_waiting": 0, "vllm:prefix_cache_hits_total": 0, "vllm:num_preemptions_total": 0,
                  "process_start_time_seconds": self.started_s}
        lines = [f"{name} {value}" for name, value in values.items()]
        if self.k:
            lines += [f"vllm:spec_decode_num_drafts_total {self.drafts}", f"vllm:spec_decode_num_draft_tokens_total {self.drafts * self.k}",
                      f"vllm:spec_decode_num_accepted_tokens_total {self.accepted}"]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {self.accepted // self.k}' for position in range(self.k)]
        return web.Response(text="\n".join(lines) + "\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if KEY and request.headers.get("authorization") != f"Bearer {KEY}":
            return web.Response(status=401, text="no key")
        body = await request.json()
        tokens = [3 + (sum(body["prompt"]) + position) % 200 for position in range(body["max_tokens"])]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            said, step = 0, 0
            while said < len(tokens):
                await asyncio.sleep(self.step_s)
                accepted = self.k if step % 2 else 0
                if step:
                    self.drafts += self.k > 0
                    self.accepted += accepted
                new, step = tokens[said:said + 1 + accepted], step + 1
                said += len(new)
                await self.say(response, {"choices": [{"index": 0, "text": "", "token_ids": new, "finish_reason": "length" if said == len(tokens) else None}],
                                          "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": said}})
            await self.say(response, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": said}})
        finally:
            self.running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def say(self, response: web.StreamResponse, chunk: dict) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def main() -> None:
    port, k, step_ms, host = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    engine, app = Engine(k, step_ms / 1000), web.Application()
    app.add_routes([web.get("/health", engine.health), web.get("/metrics", engine.metrics), web.post("/v1/completions", engine.completions)])
    web.run_app(app, host=host, port=port, print=None)


if __name__ == "__main__":
    main()
