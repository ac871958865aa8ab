"""One question to a server, answered at once: for what is not measured."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from raysd.errors import EngineError, ExperimentError
from raysd.load.address import Address

TIMEOUT_S = 300.0
FIRST_TIMEOUT_S = 10.0
"""For a server that nobody has spoken with yet."""


def ask_json(address: Address, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON that a server answers, to a POST if there is a body. Raises EngineError, with the server's own words, if there is none."""
    try:
        return json.loads(ask_text(address, path, body, timeout_s))
    except ValueError as err:
        raise EngineError(what=f"the server's answer is not JSON: {err}", where=f"{address.url}{path}", fix="look at the server's log") from err


def ask_text(address: Address, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """The text that a server answers, likewise."""
    url, fix = f"{address.url}{path}", "look at the server's log"
    handlers = [urllib.request.ProxyHandler({})]  # a server that is measured is never behind the proxy of the environment
    if address.tls:
        handlers.append(urllib.request.HTTPSHandler(context=address.tls_context()))
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode("utf-8"), {"content-type": "application/json", **address.headers()})
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            return response.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as err:
        raise EngineError(what=f"the server answered {err.code}: {err.read(500).decode('utf-8', errors='replace')}", where=url, fix=fix) from err
    except (OSError, ValueError) as err:
        raise EngineError(what=f"the server did not answer: {err}", where=url, fix=fix) from err


def served_model(address: Address, asked: str | None) -> str:
    """The model to put into requests: the one asked for, or the only one that is served.

    Raises ExperimentError if the server does not speak OpenAI's API, does not serve what is asked for, or serves several and none is named; EngineError if it does not answer.
    """
    listed = _models(address)
    if asked is None and len(listed) != 1:
        raise ExperimentError(what=f"the server has {len(listed)} models: {', '.join(listed)}", where="--model", fix="name one of them")
    if asked is not None and asked not in listed:
        raise ExperimentError(what=f"the server has no model {asked}", where="--model", fix=f"use one of: {', '.join(listed)}")
    return asked or listed[0]


def _models(address: Address) -> list[str]:
    """The names of the models that a server has."""
    try:
        return [str(model["id"]) for model in ask_json(address, "/v1/models", timeout_s=FIRST_TIMEOUT_S)["data"]]
    except EngineError as err:
        raise EngineError(what=err.what, where=err.where, fix="start the server, or name the address of an OpenAI-compatible API, without /v1") from err
    except (KeyError, TypeError) as err:
        raise ExperimentError(what="what it answers to /v1/models is no list of models: it is not OpenAI-compatible", where=address.url, fix="name the address of its API, without /v1") from err
