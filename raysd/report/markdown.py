"""The report as Markdown, for terminals, pull requests and job summaries; the pictures lie beside it."""

from __future__ import annotations

import re
from dataclasses import replace

from raysd.report.document import Block, Bullets, Document, Heading, Paragraph, Picture, Table, Terms, Value


def render_markdown(document: Document) -> str:
    """GitHub-flavoured Markdown. Characters of a name that would be markup are escaped."""
    parts = [f"# {_text(document.title)}", _text(document.subtitle), *(f"> **{_text(warning)}**" for warning in document.warnings), f"**{_text(document.headline)}**"]
    for section in document.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join([*parts, "---", _text(document.footer)]) + "\n"


def without_pictures(document: Document) -> Document:
    """The document for a place where no picture lies beside it."""
    sections = [replace(section, blocks=[block for block in section.blocks if not isinstance(block, Picture)]) for section in document.sections]
    return replace(document, sections=sections)


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"### {_text(text)}"
        case Paragraph(text):
            return _text(text)
        case Bullets(items):
            return "\n".join(f"- {_text(item)}" for item in items)
        case Terms(entries):
            return "\n".join(f"- **{_text(word)}**: {_text(meaning)}" for word, meaning in entries)
        case Picture(file, alt, caption):
            return f"![{_text(alt)}]({file})\n\n*{_text(caption)}*"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    heads = [_text(column.name + (f" ({column.unit})" if column.unit else "")) for column in table.columns]
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    rows = [[_text(cell.text if isinstance(cell, Value) else cell) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, rules, *rows)]
    note = f"\n\n{_text(table.note)}" if table.note else ""
    return f"**{_text(table.title)}**\n\n" + "\n".join(lines) + note


def _text(text: str) -> str:
    """Plain text as Markdown that shows it unchanged, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(text.split()))
