"""The report as one HTML file that opens without a network: pictures and style are inside it."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from raysd.report.document import Document


def render_html(document: Document, pictures: Path) -> str:
    """The whole page. pictures: the folder that holds the PNG files the document names. All text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: `raysd plan` works without Jinja

    def data_uri(file: str) -> str:
        return "data:image/png;base64," + base64.b64encode((pictures / file).read_bytes()).decode("ascii")

    environment = Environment(
        loader=PackageLoader("raysd", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["data_uri"] = data_uri
    environment.finalize = _unbroken
    return environment.get_template("report.html.j2").render(document=document)


def _unbroken(value: object) -> object:
    """Text whose numbers stay on one line with their unit, and `k = 3` in one piece."""
    if type(value) is not str:  # Markup is escaped already, and holds attributes
        return value
    return re.sub(r"(?<=\d) (?=(?:nat|ms|s|GiB|MiB|tok/s)\b|%)|(?<=\b[kn]) (?==)|(?<==) (?=\d)", "\N{NO-BREAK SPACE}", value)
