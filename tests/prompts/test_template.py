import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from raysd.errors import ExperimentError
from raysd.prompts.prompt_set import Prompt
from raysd.prompts.template import render

WORDS = ["<unk>", "<user>", "<assistant>", "<system>", "make", "tea", "be", "brief"]
TEMPLATE = ("{% for m in messages %}{{ '<' + m.role + '>' }} {{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def tokenizer(template: str | dict | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=template)


def prompt(text: str, *before: dict[str, str], id: str = "p") -> Prompt:
    return Prompt(id, (*before, {"role": "user", "content": text}), "t", "train")


def refused(prompts: list[Prompt], template: str | dict | None = TEMPLATE, max_prompt_tokens: int = 10) -> ExperimentError:
    with pytest.raises(ExperimentError) as caught:
        render(prompts, tokenizer(template), max_prompt_tokens, where="p.jsonl")
    assert caught.value.exit_code == 64
    return caught.value


def test_prompts_become_plain_token_ids_that_end_where_the_answer_begins():
    rendered = render([prompt("make tea"), prompt("tea", {"role": "system", "content": "be brief"})], tokenizer(), 10, where="p.jsonl")
    assert rendered == [[1, 4, 5, 2], [3, 6, 7, 1, 5, 2]]
    assert all(type(token_ids) is list and type(token_id) is int for token_ids in rendered for token_id in token_ids)


def test_a_prompt_may_fill_the_limit_and_not_pass_it():
    assert len(render([prompt("make tea")], tokenizer(), 4, where="p.jsonl")[0]) == 4
    error = refused([prompt("tea"), prompt("make tea", id="long"), prompt("make make tea", id="longer")], max_prompt_tokens=3)
    assert "`long` has 4 tokens, and 3 " in error.what and "1 more of the 3 prompts" in error.what
    assert error.where == "p.jsonl" and "target.max_model_len" in error.fix


@pytest.mark.parametrize("template", [None, ""])
def test_a_tokenizer_without_a_chat_template_is_refused(template):
    error = refused([prompt("tea")], template)
    assert "no chat template" in error.what and "target.chat_template" in error.where + error.fix


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no system role here') }}",
    "{% for m in messages %}{{ m.content ",
    "{{ 1 + messages[0].content }}",
    "{{ 1 // 0 }}",
    {"tool_use": "x"},
])
def test_a_template_that_fails_is_named_with_the_prompt_and_the_reason(template):
    error = refused([prompt("tea", id="first")], template)
    assert "fails on the prompt `first`" in error.what and "target.chat_template" in error.fix


def test_a_template_that_makes_nothing_of_a_prompt_is_refused():
    assert "no tokens of the prompt `p`" in refused([prompt("tea")], "{# nothing #}").what
