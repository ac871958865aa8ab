"""The target's tokenizer, with the chat template that the experiment serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raysd.errors import ExperimentError
from raysd.experiment.target import TargetSection
from raysd.target.shape import read_shape


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
    """Another model's tokenizer gives itself away cheaply: by ids that the target has no embedding for, or by ordinary words where the target's answers end."""
    where, fix = f"target.model: {folder}", "put the tokenizer that the model was trained with beside its config.json"
    largest, rows = max(tokenizer.get_vocab().values()), read_shape(folder).vocab_size
    if largest >= rows:
        raise ExperimentError(what=f"the tokenizer's ids reach {largest}, the target's vocab_size is {rows}", where=where, fix=fix)
    ends, special = eos_token_ids(folder), {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if ends and not special & set(ends):
        words = ", ".join(f"{i} ({tokenizer.decode([i])!r})" if 0 <= i <= largest else f"{i} (none)" for i in ends)
        raise ExperimentError(what=f"the target's eos_token_id {words} is no special token of its tokenizer", where=where, fix=fix)


def eos_token_ids(folder: Path) -> list[int]:
    """Tokens that end an answer: `eos_token_id` of generation_config.json, or else of config.json; one id or several.

    Raises ExperimentError if a file holds something else.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as err:
            raise ExperimentError(what=f"{path} cannot be read: {err}", where=f"target.model: {folder}", fix="correct the file, or fetch the model again") from err
        ids = [ids] if isinstance(ids, int) else ids
        if ids is not None:
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise ExperimentError(what=f"{path} has eos_token_id = {ids!r}, not one token id or a list of them", where=f"target.model: {folder}",
                                      fix="correct the file, or fetch the model again")
            return ids
    return []
