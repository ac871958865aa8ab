"""One question to a server, answered at once: for what is not measured."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from raysd.errors import EngineError, ExperimentError
from raysd.load.address import Address
from raysd.load.connection import Response, connect, reason

LIMIT_S = 300.0
FIRST_LIMIT_S = 10.0
"""For a server that nobody has spoken with yet."""
SHOWN_CHARACTERS = 500
"""Of what a server says that has no answer."""


def ask_json(address: Address, path: str, body: dict[str, Any] | None = None, limit_s: float = LIMIT_S) -> Any:
    """The JSON that a server answers, to a POST if there is a body. Raises EngineError, with the server's own words, if there is none."""
    try:
        return json.loads(ask_text(address, path, body, limit_s))
    except (ValueError, RecursionError) as err:
        raise EngineError(what=f"the server's answer is not JSON: {err}", where=f"{address.url}{path}", fix="look at the server's log") from err


def ask_text(address: Address, path: str, body: dict[str, Any] | None = None, limit_s: float = LIMIT_S) -> str:
    """The text that a server answers, likewise. limit_s: for all of it, from the connection to the last byte, however the server deals its bytes out."""
    url, fix = f"{address.url}{path}", "look at the server's log"
    try:
        response = asyncio.run(_answer(address, path, None if body is None else json.dumps(body).encode("utf-8"), limit_s))
    except TimeoutError as err:
        raise EngineError(what=f"the server did not answer within {limit_s:g} s", where=url, fix=fix) from err
    except OSError as err:
        raise EngineError(what=f"the server did not answer: {reason(err)}", where=url, fix=fix) from err
    text = b"".join(content for _, content in response.reads).decode("utf-8", errors="replace")
    if not 200 <= response.status < 300:
        raise EngineError(what=f"the server answered {response.status}: {address.shown(text.strip(), SHOWN_CHARACTERS)}", where=url, fix=fix)
    return text


async def _answer(address: Address, path: str, body: bytes | None, limit_s: float) -> Response:
    async with asyncio.timeout(limit_s):
        connection = await connect(address, address.tls_context(), limit_s)
        try:
            _, answer = connection.send(path, body, "application/json")
            return await answer
        finally:
            connection.close()


def served_model(address: Address, asked: str | None, limit_s: float = FIRST_LIMIT_S) -> str:
    """The model to put into requests: the one asked for, or the only one that is served.

    Raises ExperimentError if the server does not speak OpenAI's API, does not serve what is asked for, or serves several and none is named; EngineError if it does not answer.
    """
    listed = _models(address, limit_s)
    if asked is None and len(listed) > 1:
        raise ExperimentError(what=f"the server has {len(listed)} models: {', '.join(listed)}", where="--model", fix="name one of them")
    if asked is not None and asked not in listed:
        raise ExperimentError(what=f"the server has no model {asked}", where="--model", fix=f"use one of: {', '.join(listed)}")
    return asked or listed[0]


def _models(address: Address, limit_s: float) -> list[str]:
    """The names of the models that a server has; at least one."""
    try:
        answer = ask_json(address, "/v1/models", limit_s=limit_s)
    except EngineError as err:
        raise EngineError(what=err.what, where=err.where, fix="start the server, or name the address of an OpenAI-compatible API, without /v1") from err
    models = answer.get("data") if isinstance(answer, dict) else None
    if models == []:
        raise EngineError(what="the server has no model", where=f"{address.url}/v1/models", fix="have it load one, and look at its log if it should have")
    names = [model.get("id") if isinstance(model, dict) else None for model in models] if isinstance(models, list) else [None]
    if not all(isinstance(name, str) and name and name.isprintable() for name in names):
        raise ExperimentError(what=f"what it answers to /v1/models is no list of models, and it is not OpenAI-compatible: {address.shown(json.dumps(answer), SHOWN_CHARACTERS)}",
                              where=address.url, fix="name the address of its API, without /v1")
    return names
