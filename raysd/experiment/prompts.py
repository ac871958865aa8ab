"""`prompts:` what the target is asked, and which of it is held out."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from raysd.experiment.section import Placement, Section


class PromptsSection(Section):
    path: Placement[Path]
    """A JSONL file, or a folder of them: one request a line, `prompt` or `messages`, optionally `id`, `topic` and `split`
    (train, choose, report). The content enters fingerprints, the path does not."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the splits of rows that name none: whole topics go to one split."""
    choose_frac: float = Field(0.05, gt=0, lt=0.5)
    """Share of topics held out for settings and checkpoints, where rows name no split."""
    report_frac: float = Field(0.05, gt=0, lt=0.5)
    """Share of topics held out for the final figures, where rows name no split."""
