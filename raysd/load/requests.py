"""What is asked of a server, and what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Request:
    """One prompt to be answered, as a stream."""

    prompt_id: str
    prompt: tuple[int, ...] | str | Messages
    """Token ids or a text for `/v1/completions`; chat messages, each with `role` and `content`, for `/v1/chat/completions`."""
    max_tokens: int
    temperature: float
    ignore_eos: bool
    """Whether the answer runs to max_tokens; known to vLLM and SGLang."""
    seed: int | None = None
    """Of its sampling; None: the server's own."""
    category: str | None = None
    """Of the prompt, where its source tells one; it is not sent."""

    @property
    def chat(self) -> bool:
        """Whether the prompt is of chat messages."""
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], dict)

    @property
    def path(self) -> str:
        """Of the URL, below the server's address."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, plain: bool = False) -> bytes:
        """The JSON that is sent. plain: without what only vLLM and its like know, some of which a stricter server would refuse."""
        prompt = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        content: dict[str, Any] = {"model": model, "messages" if self.chat else "prompt": prompt, "max_tokens": self.max_tokens, "temperature": self.temperature, "stream": True,
                                   "stream_options": {"include_usage": True}}
        if self.seed is not None:
            content["seed"] = self.seed
        if not plain:
            content["stream_options"]["continuous_usage_stats"] = True
            content["return_token_ids"] = True  # token ids come out, so that nothing is tokenised again
        if self.ignore_eos:
            content["ignore_eos"] = True
        return json.dumps(content, separators=(",", ":")).encode("utf-8")


@dataclass(frozen=True)
class Result:
    """What came of one request. With an error all counts are 0 and all sequences empty: half an answer is no measurement."""

    prompt_id: str
    intended_ns: int
    """`perf_counter_ns` at which it was to be sent: by its arrival time, or when a place among those in flight became free."""
    dispatched_ns: int
    """Just before it was sent, on a connection that was there."""
    ended_ns: int
    """When its last byte had come, or when it failed."""
    error: str | None = None
    connect_ms: float | None = None
    """How long its connection took, if it was made for this request."""
    token_ids: tuple[int, ...] = ()
    """Empty if the server does not tell them."""
    text: str = ""
    """Empty if the server tells token ids."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, from the server's prefix cache, where it says so."""
    output_tokens: int = 0
    """As the server's usage counts them."""
    chunk_ns: tuple[int, ...] = ()
    """When each chunk with tokens arrived; the first is the first token, the last the last."""
    chunk_tokens: tuple[int, ...] = ()
    """Tokens of each chunk; empty if the server tells only how many there are in all."""
    drafts: int | None = None
    """Verify steps that had a draft, where the server tells it of each request."""
    per_position: tuple[int, ...] = ()
    """Accepted draft tokens by position, first to k-th, likewise."""
