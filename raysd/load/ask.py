"""One question to an OpenAI-compatible server, answered at once: for what is not measured."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from raysd.errors import EngineError

TIMEOUT_S = 300.0


def ask_completion(base_url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer of `/v1/completions`. base_url: without `/v1`. Raises EngineError, with the server's own words, if there is none."""
    url = f"{base_url}/v1/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an engine is never behind the proxy of the environment
    request = urllib.request.Request(url, json.dumps(body).encode("utf-8"), {"content-type": "application/json"})
    fix = "look at the engine's log"
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as err:
        raise EngineError(what=f"the server answered {err.code}: {err.read(500).decode('utf-8', errors='replace')}", where=url, fix=fix) from err
    except (OSError, ValueError) as err:
        raise EngineError(what=f"the server did not answer: {err}", where=url, fix=fix) from err
    return answer
