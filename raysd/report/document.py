"""A report as data: sections of paragraphs, lists, tables and pictures, before it is HTML or Markdown.

Text is plain text. Whoever renders it escapes it, so a name that holds markup stays a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["plain", "good", "bad", "quiet"]
"""How a statement is coloured; the words carry the meaning by themselves."""


@dataclass(frozen=True)
class Paragraph:
    text: str
    tone: Tone = "plain"
    kind: Literal["paragraph"] = field(default="paragraph", init=False)


@dataclass(frozen=True)
class Heading:
    """Stands above the blocks of one part of a section."""

    text: str
    kind: Literal["heading"] = field(default="heading", init=False)


@dataclass(frozen=True)
class Bullets:
    items: list[str]
    kind: Literal["bullets"] = field(default="bullets", init=False)


@dataclass(frozen=True)
class Terms:
    """Words and what they mean."""

    entries: list[tuple[str, str]]
    kind: Literal["terms"] = field(default="terms", init=False)


@dataclass(frozen=True)
class Column:
    name: str
    unit: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Value:
    """One cell of a table."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[Column]
    rows: list[list[str | Value]]
    note: str = ""
    kind: Literal["table"] = field(default="table", init=False)


@dataclass(frozen=True)
class Picture:
    """A PNG that lies beside the report."""

    file: str
    alt: str
    caption: str
    kind: Literal["picture"] = field(default="picture", init=False)


Block = Heading | Paragraph | Bullets | Terms | Table | Picture


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Tile:
    """One figure worth a glance."""

    label: str
    figure: str
    detail: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    headline: str
    warnings: list[str]
    """What a reader must know before any number."""
    tiles: list[Tile]
    sections: list[Section]
    footer: str
