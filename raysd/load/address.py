"""Where a server is: the URL that a user gives, taken apart; and the key to it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from raysd.errors import ExperimentError

TELLING_CHARACTERS = 8
"""Of a key's begin: fewer say nothing about it."""


@dataclass(frozen=True)
class Address:
    """A server with an OpenAI-compatible API. It can be pickled."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """Of its paths, without `/v1`; empty or beginning with a slash."""
    api_key: str | None = field(default=None, repr=False)

    @property
    def authority(self) -> str:
        """Host and port, as URLs have them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Without `/v1`."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def shown(self, said: str, at_most: int) -> str:
        """What a server said, or so many characters of it, fit to be shown on one line: without the key, which some repeat as they refuse it, and which what is shown
        may have been cut within; and with escapes for what would move a terminal's cursor, end the line or turn the text around."""
        if (key := self.api_key) is not None:
            for length in range(len(key), min(len(key), TELLING_CHARACTERS) - 1, -1):
                said = said.replace(key[:length], "(the key)")
        return "".join(character if character.isprintable() else character.encode("unicode_escape").decode("ascii") for character in said[:at_most])

    def tls_context(self) -> ssl.SSLContext | None:
        """For its connections; None without TLS."""
        return ssl.create_default_context() if self.tls else None


def parse_address(url: str, api_key: str | None = None) -> Address:
    """The address that a URL names; `/v1` at its end may be there or not. Raises ExperimentError if it names none, or holds what a request cannot."""
    text = url if "://" in url else f"http://{url}"
    shown = re.sub(r"//.*@", "//...@", re.split("[?#]", text)[0])  # secrets are put into both of what is left out
    fix = "write it like http://127.0.0.1:8000, without a query or a user name; a key comes from the environment"
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except ValueError:  # UnicodeError is one; its words quote what it was given, and so may hold half a password
        raise ExperimentError(what="not the URL of a server: its host or port can be none", where=f"URL: {shown}", fix=fix) from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc or port == 0:
        raise ExperimentError(what="not the URL of a server", where=f"URL: {shown}", fix=fix)
    if not re.fullmatch("[!-~]*", host + parts.path):
        raise ExperimentError(what="a space or another character that no URL has", where=f"URL: {shown!r}", fix="write it as %20, and others likewise")
    tls = parts.scheme == "https"
    return Address(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), api_key)


def key_from(environment: Mapping[str, str], name: str) -> str:
    """The API key that a variable holds. Raises ExperimentError, in which it does not show, if there is none or no header can carry it."""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ExperimentError(what="no name of a variable", where="--api-key-env", fix="name the environment variable that holds the key, and not the key itself")
    key = environment.get(name)
    if not key:
        raise ExperimentError(what=f"the environment has no variable {name}, or it is empty", where="--api-key-env", fix="export it before")
    if not re.fullmatch("[!-~]([ -~]*[!-~])?", key):
        raise ExperimentError(what=f"{name} holds a line break, a space at an end, or another character that a header cannot carry", where=f"--api-key-env {name}",
                              fix="export the key alone; it consists of ASCII characters that can be printed")
    return key
