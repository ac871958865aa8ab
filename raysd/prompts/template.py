"""The target's chat template, applied: from messages to the token ids that the target is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jinja2

from raysd.errors import ExperimentError
from raysd.prompts.prompt_set import Prompt


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: str | dict[str, str] | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def render(prompts: Sequence[Prompt], tokenizer: ChatTokenizer, max_prompt_tokens: int, where: object) -> list[list[int]]:
    """Token ids of each prompt up to where the answer begins, in the order given; each holds 1 to max_prompt_tokens of them.

    where: names the source of the prompts in messages. Raises ExperimentError if the tokenizer has no chat template, if the template
    cannot render a prompt, or if one comes out longer than max_prompt_tokens.
    """
    if not tokenizer.chat_template:
        raise ExperimentError(what="the target's tokenizer has no chat template", where="target.chat_template",
                              fix="set target.chat_template to a Jinja file, or use an instruct model that carries one")
    rendered = [_token_ids(prompt, tokenizer, where) for prompt in prompts]
    too_long = [(prompt, len(token_ids)) for prompt, token_ids in zip(prompts, rendered, strict=True) if len(token_ids) > max_prompt_tokens]
    if too_long:
        prompt, tokens = too_long[0]
        more = f"; {len(too_long) - 1} more of the {len(prompts)} prompts are too long" if len(too_long) > 1 else ""
        raise ExperimentError(what=f"the prompt `{prompt.id}` has {tokens} tokens, and {max_prompt_tokens} leave room for its answer{more}",
                              where=where, fix="shorten it, or raise target.max_model_len")
    return rendered


def _token_ids(prompt: Prompt, tokenizer: ChatTokenizer, where: object) -> list[int]:
    fix = "change the prompt's messages to what the template allows, or set target.chat_template to a template that takes them"
    try:
        token_ids = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as err:  # what a template can raise
        raise ExperimentError(what=f"the chat template fails on the prompt `{prompt.id}`: {type(err).__name__}: {err}",
                              where=where, fix=fix) from err
    if not token_ids:
        raise ExperimentError(what=f"the chat template makes no tokens of the prompt `{prompt.id}`", where=where, fix=fix)
    return token_ids
