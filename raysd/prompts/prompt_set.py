"""A prompt set: read from its source, checked, and split by topic into train, choose and report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from raysd.artifacts import fingerprint
from raysd.errors import ExperimentError
from raysd.experiment import Experiment
from raysd.experiment.prompts import PromptsSection
from raysd.prompts.rows import Row
from raysd.prompts.source import read_source

Split = Literal["train", "choose", "report"]


@dataclass(frozen=True)
class Prompt:
    """One request to the target."""

    id: str
    messages: tuple[dict[str, str], ...]
    """Chat messages, `role` and `content`."""
    topic: str
    split: Split
    category: str | None = None
    """What kind of request it is, for acceptance by category; None if its source does not say."""


@dataclass(frozen=True)
class PromptSet:
    """All prompts of an experiment, in the order of their files."""

    prompts: tuple[Prompt, ...]
    source: str = "prompts"
    """Where they came from, for messages."""
    measured: Mapping[str, PromptSet] = field(default_factory=dict)
    """Name of a workload that has prompts of its own to these."""

    def split(self, name: Split, limit: int | None = None) -> list[Prompt]:
        """The prompts of one split, or its first `limit`. Raises ExperimentError if it is empty or holds fewer than the limit."""
        found = [prompt for prompt in self.prompts if prompt.split == name]
        if not found:
            topics = len({prompt.topic for prompt in self.prompts})
            held_out = "" if name == "train" else f", or raise prompts.{name}_frac if the rows name no split"
            raise ExperimentError(what=f"the split `{name}` is empty: none of the {len(self.prompts)} prompts ({topics} topics) is in it",
                                  where=self.source, fix=f"add rows with \"split\": \"{name}\"{held_out}")
        if limit is not None and limit > len(found):
            raise ExperimentError(what=f"{limit} prompts of the split `{name}` are asked for, and it holds {len(found)}", where=self.source,
                                  fix=f"ask for at most {len(found)}, or add prompts to the split")
        return found[:limit]

    def alone(self, name: Split) -> PromptSet:
        """The same without the prompts of the other splits."""
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.split == name))

    def fingerprint(self, *splits: Split) -> str:
        """Hash of what these splits hold: ids, messages, topics, splits, categories and their order.

        The folder that the files lie in is no part of it; a file's name is, for rows without an `id` of their own.
        """
        return fingerprint([[prompt.id, list(prompt.messages), prompt.topic, prompt.split, *([] if prompt.category is None else [prompt.category])]
                            for prompt in self.prompts if prompt.split in splits])


def load_prompts(section: PromptsSection) -> PromptSet:
    """The prompts at `section.path`, each with a split.

    A row has `prompt` or `messages`, optionally `id` (else `<file name>:<line>`), `topic` (else the id), `category` and `split`; other keys are the
    user's own. Recorded conversations and SPEED-Bench's questions are read as such rows (files.py). A row without a split follows its topic where another row names that topic's split, and is otherwise put into one by
    SHA-256 of the seed and its topic, so a topic never lies in two splits.

    Raises ExperimentError, naming file, line and field, for a missing or empty source, a row that cannot be used, an id that is
    there twice, and a topic that the rows themselves put into two splits.
    """
    rows = read_source(section.path, "prompts.path")
    named = _named_splits(rows)
    prompts = []
    for row in rows:
        split = row.split or named.get(row.topic) or drawn_split(_group(row), section.seed, section.choose_frac, section.report_frac)
        prompts.append(Prompt(id=row.id, messages=row.messages, topic=row.topic or row.id, split=split, category=row.category))
    _refuse_leaks(prompts, section)
    return PromptSet(prompts=tuple(prompts), source=str(section.path))


def load_prompts_of(experiment: Experiment) -> PromptSet:
    """The prompts of an experiment, with those that workloads of its sweep have of their own.

    Raises ExperimentError as `load_prompts` and `load_measured_prompts` do, and for a workload's prompt that a draft is trained on or chosen by.
    """
    prompts = load_prompts(experiment.prompts)
    measured = {workload.name: load_measured_prompts(workload.prompts, workload.place("prompts")) for workload in experiment.sweep.workloads if workload.prompts is not None}
    seen = {json.dumps(prompt.messages): prompt for prompt in prompts.prompts if prompt.split != "report"} if measured else {}
    for own in measured.values():
        for prompt in own.prompts:
            if (known := seen.get(json.dumps(prompt.messages))) is not None:
                raise ExperimentError(what=f"the prompt `{prompt.id}` is also `{known.id}` of the split `{known.split}`: the draft has seen it", where=own.source,
                                      fix="remove it here or there, or say in its row that it is of that split")
    return replace(prompts, measured=measured)


def load_measured_prompts(path: Path, of_field: str) -> PromptSet:
    """The prompts at a path that something is only measured with, all as split `report`: those that name no split, or this one.

    of_field: of the experiment, for messages. Raises ExperimentError as `load_prompts` does, and if no prompt is left.
    """
    rows = [row for row in read_source(path, of_field) if row.split in (None, "report")]
    if not rows:
        raise ExperimentError(what="every prompt in it names a split other than `report`", where=f"{path} ({of_field})", fix="name prompts that nothing is trained on or chosen by")
    return PromptSet(tuple(Prompt(row.id, row.messages, row.topic or row.id, "report", row.category) for row in rows), f"{path} ({of_field})")


def _refuse_leaks(prompts: Iterable[Prompt], section: PromptsSection) -> None:
    """Raises ExperimentError if the same request lies in two splits."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        earlier = first.setdefault(json.dumps(prompt.messages), prompt)
        if earlier.split != prompt.split:
            raise ExperimentError(what=f"the prompts `{earlier.id}` ({earlier.split}) and `{prompt.id}` ({prompt.split}) are the same request: "
                                       "what is held out would leak", where=f"{section.path} (prompts.path)", fix="remove one of them, or put both into one split")


def drawn_split(topic: str, seed: int, choose_frac: float, report_frac: float) -> Split:
    """The split of a topic whose rows name none: the same on every machine, and unmoved by other topics that come or go."""
    digest = hashlib.sha256(json.dumps([seed, topic]).encode("utf-8")).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < report_frac:
        return "report"
    return "choose" if position < report_frac + choose_frac else "train"


def _group(row: Row) -> str:
    """What stays together in one split: the topic, or for a row without one its text, so that the same request twice is never both
    trained on and held out, and a line added above moves nothing."""
    return row.topic if row.topic is not None else json.dumps(row.messages)


def _named_splits(rows: Iterable[Row]) -> dict[str | None, Split]:
    """Topic to the split that rows name for it. Raises ExperimentError if they name two."""
    first: dict[str | None, Row] = {}
    for row in rows:
        if row.topic is None or row.split is None:
            continue
        earlier = first.setdefault(row.topic, row)
        if earlier.split != row.split:
            raise ExperimentError(what=f"the topic `{row.topic}` is in the split `{row.split}` here and in `{earlier.split}` at "
                                       f"{earlier.place}: what is held out would leak", where=f"{row.place}: split",
                                  fix="put all rows of a topic into one split")
    return {topic: row.split for topic, row in first.items()}
