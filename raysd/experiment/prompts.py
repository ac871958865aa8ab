"""`prompts:` what the target is asked, and which of it is held out."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from raysd.experiment.section import Placement, Section

HUB_PREFIX = "hf:"
"""How the name of a data set of the Hugging Face hub begins, in the place of a path."""


class PromptsSection(Section):
    path: Placement[Path]
    """A file, a folder of files, or a data set of the Hugging Face hub: `hf:ORG/NAME[:SPLIT][@REVISION]`, where SPLIT may be CONFIG/SPLIT. JSONL, JSON lists,
    Parquet and CSV are read, with one request a row: `prompt` or `messages`, optionally `id`, `topic`, `category` and `split` (train, choose, report); ShareGPT's
    `conversations`; or SPEED-Bench's questions. The content enters fingerprints, the path does not."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the splits of rows that name none: whole topics go to one split."""
    choose_frac: float = Field(0.05, gt=0, lt=0.5)
    """Share of topics held out for settings and checkpoints, where rows name no split."""
    report_frac: float = Field(0.05, gt=0, lt=0.5)
    """Share of topics held out for the final figures, where rows name no split."""
