"""The target's tokenizer, with the chat template that the experiment serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raysd.errors import ExperimentError
from raysd.experiment.target import TargetSection
from raysd.target.shape import read_shape

LEAST_WORDS_FRAC = 0.9
"""Of the target's rows, for which its own tokenizer has a token: the others are padding, which in DeepSeek-LLM, with much of it, is 2,385 of 102,400 rows."""


def load_tokenizer(folder: Path, section: TargetSection) -> Any:
    """The Hugging Face tokenizer of a target's folder. Raises ExperimentError if it cannot be loaded, if it is not the target's, or if there is no chat template,
    neither its own nor the experiment's.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    except Exception as err:  # transformers raises whatever a missing or broken file leads to
        raise ExperimentError(what=f"the target's tokenizer cannot be loaded: {type(err).__name__}: {str(err).strip().splitlines()[0] if str(err).strip() else ''}",
                              where=f"target.model: {folder}", fix="put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its config.json") from err
    _check_it_is_the_targets(tokenizer, folder)
    if section.chat_template is not None:
        try:
            tokenizer.chat_template = section.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ExperimentError(what=f"the chat template cannot be read: {err}", where=f"target.chat_template: {section.chat_template}",
                                  fix="name a Jinja file in UTF-8") from err
    if not tokenizer.chat_template:
        raise ExperimentError(what=f"the target's tokenizer has no chat template ({folder})", where="target.chat_template",
                              fix="name a Jinja file in target.chat_template; base models without one are not chat targets")
    return tokenizer


def _check_it_is_the_targets(tokenizer: Any, folder: Path) -> None:
    """Another model's tokenizer gives itself away cheaply: by ids that the target has no embedding for, by far fewer tokens than the target
    has embeddings, or by ordinary words where the target's answers end. One of the same size and the same special tokens cannot be told from the target's own."""
    where, fix = f"target.model: {folder}", "put the tokenizer that the model was trained with beside its config.json"
    words = tokenizer.get_vocab()
    largest, rows = max(words.values()), read_shape(folder).vocab_size
    if largest >= rows:
        raise ExperimentError(what=f"the tokenizer's ids reach {largest}, the target's vocab_size is {rows}", where=where, fix=fix)
    if len(words) < LEAST_WORDS_FRAC * rows:
        raise ExperimentError(what=f"the tokenizer has {len(words)} tokens, the target's vocab_size is {rows}: the other {rows - len(words)} could not be read", where=where, fix=fix)
    ends, special = eos_token_ids(folder), {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if ends and not special & set(ends):
        shown = ", ".join(f"{i} ({tokenizer.decode([i])!r})" if 0 <= i <= largest else f"{i} (none)" for i in ends)
        raise ExperimentError(what=f"the target's eos_token_id {shown} is no special token of its tokenizer", where=where, fix=fix)


def eos_token_ids(folder: Path) -> list[int]:
    """Tokens that end an answer: `eos_token_id` of generation_config.json, or else of config.json; one id or several.

    Raises ExperimentError if a file holds something else.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = _read_object(folder, path).get("eos_token_id")
        ids = [ids] if isinstance(ids, int) else ids
        if ids is not None:
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise ExperimentError(what=f"{path} has eos_token_id = {ids!r}, not one token id or a list of them", where=f"target.model: {folder}",
                                      fix="correct the file, or fetch the model again")
            return ids
    return []


def special_token_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Tokens that a draft must be able to propose whatever the captured answers hold, ascending: those that are marked as special, have a role, or end an answer.

    Many have no role, such as those that begin a tool call. tokenizer: of `load_tokenizer`. Raises ExperimentError as `marked_token_ids` does.
    """
    marked = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*marked_token_ids(folder), *marked, *tokenizer.all_special_ids})


def marked_token_ids(folder: Path) -> list[int]:
    """Of the special tokens those that can be told without a tokenizer's library: what its files mark as special, and what ends an answer. Ascending.

    Raises ExperimentError for a file that cannot be read.
    """
    listed, by_id = (_read_object(folder, folder / name).get(entries) for name, entries in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")))
    try:
        marked = {int(entry["id"]) for entry in listed or [] if entry.get("special")} | {int(token_id) for token_id, entry in (by_id or {}).items() if entry.get("special")}
        return sorted(marked | set(eos_token_ids(folder)))
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise ExperimentError(what=f"the tokenizer's added tokens cannot be read: {err!r}", where=f"target.model: {folder}", fix="fetch the model again") from err


def _read_object(folder: Path, path: Path) -> dict[str, Any]:
    """The JSON object in one of the target's files; empty if there is no such file. Raises ExperimentError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as err:
        raise ExperimentError(what=f"{path} cannot be read: {err}", where=f"target.model: {folder}", fix="correct the file, or fetch the model again") from err
    if not isinstance(found, dict):
        raise ExperimentError(what=f"{path} cannot be read: it holds {type(found).__name__}, not an object", where=f"target.model: {folder}",
                              fix="correct the file, or fetch the model again")
    return found
