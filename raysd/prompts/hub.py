"""Data sets of the Hugging Face hub, by name: `hf:ORG/NAME[:SPLIT][@REVISION]`; fetched once into the hub's own cache, and read from there."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from raysd.errors import ExperimentError
from raysd.experiment.prompts import HUB_PREFIX

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<split>[\w.-]+(?:/[\w.-]+)?))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """What a name says."""

    repository: str
    split: str | None
    """`SPLIT` or `CONFIG/SPLIT`; None: all that the data set has."""
    revision: str | None


def is_hub_name(path: Path | str) -> bool:
    """Whether a `path` of the experiment names a data set of the hub."""
    return str(path).startswith(HUB_PREFIX)


def parse_hub_name(text: str, where: str) -> HubName:
    """The parts of `hf:ORG/NAME[:SPLIT][@REVISION]`. Raises ExperimentError for anything else."""
    found = NAME.fullmatch(text)
    if found is None:
        raise ExperimentError(what=f"`{text}` is no name of a data set", where=where,
                              fix="write hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME:CONFIG/SPLIT, each with @REVISION if you like")
    return HubName(**found.groupdict())


def hub_files(text: str, where: str) -> dict[str, Path]:
    """The files of a data set, or of one split of it, by their paths in it. What the cache holds whole is not asked for again while the hub cannot be reached.

    Raises ExperimentError if the name is none, if the hub gives nothing and the cache holds nothing, if the split is unknown, or if there is no file of a form that
    can be read.
    """
    name = parse_hub_name(text, where)
    folder = _snapshot(name, where)
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith("."))
    if not files:
        raise ExperimentError(what=f"the data set {name.repository} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file", where=where,
                              fix="convert it to one of these, or name a branch that holds them, such as @refs/convert/parquet")
    data = [path for path in files if path.suffix != ".json"] or files  # beside data, JSON describes it
    chosen = data if name.split is None else _of_split(name.split, data, folder, where)
    return {path.relative_to(folder).as_posix(): path for path in chosen}


def _snapshot(name: HubName, where: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = {"repo_type": "dataset", "revision": name.revision, "allow_patterns": [f"*{suffix}" for suffix in SUFFIXES] + ["README.md"]}
    try:
        return Path(snapshot_download(name.repository, **wanted))
    except GatedRepoError as err:
        raise ExperimentError(what=f"the data set {name.repository} is given only to accounts that accepted its terms", where=where,
                              fix="accept them on its page, and set HF_TOKEN in the environment") from err
    except RevisionNotFoundError as err:
        raise ExperimentError(what=f"the data set {name.repository} has no revision `{name.revision}`", where=where, fix="name a branch, tag or commit of it") from err
    except RepositoryNotFoundError as err:
        raise ExperimentError(what=f"the hub has no data set {name.repository}, or shows it to nobody without a token", where=where,
                              fix="correct the name, or set HF_TOKEN in the environment") from err
    except Exception as err:  # what lies below it raises whatever a network leads to, and other kinds in every version
        raise ExperimentError(what=f"the data set {name.repository} cannot be fetched, and the cache does not hold it: {type(err).__name__}: {_first_line(err)}", where=where,
                              fix="fetch it where the hub can be reached (`hf download --repo-type dataset`) and set HF_HOME to that cache, or name a local file or folder") from err


def _of_split(wanted: str, files: list[Path], folder: Path, where: str) -> list[Path]:
    """The files of a split: as the data set's card says, and where it says nothing, by their names."""
    config, _, split = wanted.rpartition("/")
    splits = _card_splits(folder, files) or _named_splits(folder, files)
    found = sorted({path for (in_config, name), paths in splits.items() if name == split and config in ("", in_config) for path in paths})
    if not found:
        known = sorted(f"{in_config}/{name}" if in_config else name for in_config, name in splits)
        raise ExperimentError(what=f"the data set has no split `{wanted}`", where=where, fix=f"use one of: {', '.join(known)}" if known else "leave the split out")
    return found


Splits = dict[tuple[str, str], list[Path]]
"""Name of a configuration (empty: the only one) and of a split, to its files."""


def _card_splits(folder: Path, files: list[Path]) -> Splits:
    """What the head of the card (README.md) lists under `configs`; empty if it lists nothing. Raises ExperimentError if it cannot be read."""
    card = folder / "README.md"
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n") if card.is_file() else []
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        head = yaml.safe_load(parts[1])
        listed = [(str(config["config_name"]), config.get("data_files") or []) for config in (head or {}).get("configs") or []]
        named: Splits = {}
        for config, entries in listed:
            for entry in [{"split": "train", "path": entries}] if isinstance(entries, str) else entries:
                patterns = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
                paths = [file for file in files if any(fnmatch.fnmatch(file.relative_to(folder).as_posix(), pattern.replace("**/", "*")) for pattern in patterns)]
                named.setdefault((config if len(listed) > 1 else "", str(entry["split"])), []).extend(paths)
        return named
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as err:
        raise ExperimentError(what=f"the card of the data set cannot be read: {_first_line(err)}", where=card, fix="leave the split out of its name") from err


def _named_splits(folder: Path, files: list[Path]) -> Splits:
    """By the hub's habit: `CONFIG/SPLIT-00000-of-00001.parquet`, `data/SPLIT.jsonl`, `SPLIT/0000.parquet`, and so on."""
    named: Splits = {}
    for file in files:
        *folders, last = file.relative_to(folder).parts
        split = re.sub(r"-\d+-of-\d+$", "", last[:-len(file.suffix)])
        if split.isdigit() and folders:
            split = folders.pop()
        config = "/".join(part for part in folders if part != "data")
        named.setdefault((config, split), []).append(file)
    return named


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0] if lines else "no message"
