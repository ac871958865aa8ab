"""Where a server is: the URL that a user gives, taken apart."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from raysd.errors import ExperimentError


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

    def tls_context(self) -> ssl.SSLContext | None:
        """For its connections; None without TLS."""
        return ssl.create_default_context() if self.tls else None


def parse_address(url: str, api_key: str | None = None) -> Address:
    """The address that a URL names; `/v1` at its end may be there or not. Raises ExperimentError if it names none."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as err:
        raise ExperimentError(what=f"not the URL of a server: {err}", where=f"URL: {url}", fix="write it like http://127.0.0.1:8000") from err
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ExperimentError(what="not the URL of a server", where=f"URL: {url}", fix="write it like http://127.0.0.1:8000, without a query or a user name; a key comes from the environment")
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), api_key)
