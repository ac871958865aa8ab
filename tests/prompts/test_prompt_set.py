import json
from pathlib import Path

import pytest

from raysd.errors import ExperimentError
from raysd.experiment.prompts import PromptsSection
from raysd.prompts.prompt_set import Prompt, PromptSet, drawn_split, load_prompts

DEMO = Path(__file__).parents[2] / "jobs" / "prompts"


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def load(path: Path, **options) -> PromptSet:
    return load_prompts(PromptsSection(path=path, **options))


def refused(path: Path) -> ExperimentError:
    with pytest.raises(ExperimentError) as caught:
        load(path)
    assert caught.value.exit_code == 64
    return caught.value


def test_rows_keep_their_order_and_what_they_leave_out_is_filled_in(tmp_path):
    file = write(tmp_path / "a.jsonl",
                 {"id": "one", "topic": "tea", "form": "tips", "split": "train", "prompt": "How do I make tea?"},
                 {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}], "split": "choose"})
    assert load(file).prompts == (
        Prompt("one", ({"role": "user", "content": "How do I make tea?"},), "tea", "train"),
        Prompt("a.jsonl:2", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}), "a.jsonl:2", "choose"))


def test_a_folder_is_read_file_by_file_in_the_order_of_names_and_only_jsonl(tmp_path):
    write(tmp_path / "b.jsonl", {"prompt": "second", "split": "train"})
    write(tmp_path / "a.jsonl", {"prompt": "first", "split": "train"})
    for other in ("README.md", ".hidden.jsonl", "c.jsonl.part"):
        write(tmp_path / other, "this is no JSON")
    assert [prompt.id for prompt in load(tmp_path).prompts] == ["a.jsonl:1", "b.jsonl:1"]


def test_only_a_newline_ends_a_line(tmp_path):
    text = "one\u2028two\u2029three\u0085four"
    file = write(tmp_path / "a.jsonl", {"prompt": text, "split": "train"}, "", {"prompt": "after a blank line", "split": "train"})
    prompts = load(file).prompts
    assert prompts[0].messages[0]["content"] == text
    assert prompts[1].id == "a.jsonl:3"


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "split": "train"}\r\n\r\n{"prompt": "b", "split": "train"}\r\n')
    assert [prompt.messages[0]["content"] for prompt in load(file).prompts] == ["a", "b"]


def test_rows_without_a_split_are_held_out_by_whole_topics(tmp_path):
    topics = [f"topic {number}" for number in range(400)]
    rows = [{"prompt": f"{form} about {topic}", "topic": topic} for form in ("Tips", "Facts", "A poem") for topic in topics]
    prompts = load(write(tmp_path / "a.jsonl", *rows), choose_frac=0.1, report_frac=0.2).prompts
    splits: dict[str, set[str]] = {}
    for prompt in prompts:
        splits.setdefault(prompt.topic, set()).add(prompt.split)
    assert all(len(found) == 1 for found in splits.values())
    counts = {name: sum(found == {name} for found in splits.values()) for name in ("train", "choose", "report")}
    # 400 draws: standard deviations are 6 and 8 topics
    assert abs(counts["choose"] - 40) < 24 and abs(counts["report"] - 80) < 32 and sum(counts.values()) == 400


EXPECTED_DRAW = ["train", "report", "report", "train", "train", "train", "train", "train",
                 "train", "report", "train", "train", "report", "train", "report", "choose"]


def test_drawn_splits_never_change_between_versions_and_differ_by_seed():
    topics = [f"topic {number}" for number in range(16)]
    # written down once: a change here would silently move held-out topics of every user into training
    assert [drawn_split(topic, 0, 0.25, 0.25) for topic in topics] == EXPECTED_DRAW
    assert [drawn_split(topic, 1, 0.25, 0.25) for topic in topics] != EXPECTED_DRAW


def test_a_row_without_a_split_follows_the_split_that_its_topic_is_named_in(tmp_path):
    rows = [{"prompt": f"{form} about {topic}", "topic": topic} for topic in map(str, range(40)) for form in ("Tips", "Facts")]
    named = [row | {"split": "report"} if row["prompt"].startswith("Facts") else row for row in rows]
    assert {prompt.split for prompt in load(write(tmp_path / "a.jsonl", *named)).prompts} == {"report"}


def test_rows_without_topic_and_split_are_drawn_by_their_text_and_not_by_their_line(tmp_path):
    rows = [{"prompt": f"question {number}"} for number in range(60)]
    by_text = {prompt.messages[0]["content"]: prompt.split for prompt in load(write(tmp_path / "a.jsonl", *rows), choose_frac=0.3).prompts}
    moved = load(write(tmp_path / "b.jsonl", {"prompt": "new at the top"}, *reversed(rows), *rows), choose_frac=0.3).prompts
    assert len(set(by_text.values())) == 3
    assert all(by_text[prompt.messages[0]["content"]] == prompt.split for prompt in moved[1:])


def test_split_returns_the_first_of_it_up_to_the_limit():
    prompts = tuple(Prompt(str(number), ({"role": "user", "content": "?"},), "t", "train") for number in range(5))
    assert [prompt.id for prompt in PromptSet(prompts).split("train", limit=3)] == ["0", "1", "2"]
    assert PromptSet(prompts).split("train") == list(prompts)


def test_an_empty_split_and_a_limit_beyond_it_are_refused_with_numbers(tmp_path):
    prompts = load(write(tmp_path / "a.jsonl", *({"prompt": f"question {number}", "split": "train"} for number in range(3))))
    with pytest.raises(ExperimentError, match="`report` is empty: none of the 3 prompts"):
        prompts.split("report")
    with pytest.raises(ExperimentError, match="4 prompts of the split `train` are asked for, and it holds 3") as caught:
        prompts.split("train", limit=4)
    assert "a.jsonl" in caught.value.where


def test_the_fingerprint_follows_the_content_of_the_splits_asked_for_and_nothing_else(tmp_path):
    rows = [{"prompt": "a", "topic": "x", "split": "train"}, {"prompt": "b", "topic": "y", "split": "report"}]
    (tmp_path / "elsewhere").mkdir()
    before = load(write(tmp_path / "p.jsonl", *rows))
    moved = load(write(tmp_path / "elsewhere" / "p.jsonl", *(row | {"note": "ignored"} for row in rows)))
    assert moved.fingerprint("train", "report") == before.fingerprint("report", "train")

    changed = load(write(tmp_path / "p.jsonl", rows[0], rows[1] | {"prompt": "c"}))
    assert changed.fingerprint("train") == before.fingerprint("train")
    assert changed.fingerprint("report") != before.fingerprint("report")
    for other in ({"topic": "z"}, {"category": "coding"}):
        assert load(write(tmp_path / "p.jsonl", rows[0] | other, rows[1])).fingerprint("train") != before.fingerprint("train")


USER = {"role": "user", "content": "Hi."}


@pytest.mark.parametrize(("row", "field", "what"), [
    ("{'prompt': 'a'}", "", "not JSON"),
    ("[1]", "", "holds a list, not an object"),
    ("null", "", "holds null, not an object"),
    ({"topic": "tea"}, "", "neither `prompt` nor `messages`"),
    ({"prompt": None}, "", "neither `prompt` nor `messages`"),
    ({"prompt": "a", "messages": [USER]}, "", "both `prompt` and `messages`"),
    ({"prompt": " \n"}, ": prompt", "empty"),
    ({"prompt": ["a"]}, ": prompt", "a list, not a string"),
    ('{"prompt": "a\\ud800"}', ": prompt", "half a character"),
    ({"prompt": "a", "id": 7}, ": id", "a number, not a string"),
    ({"prompt": "a", "topic": {}}, ": topic", "an object, not a string"),
    ({"prompt": "a", "topic": ""}, ": topic", "empty"),
    ({"prompt": "a", "split": True}, ": split", "a truth value, not a string"),
    ({"prompt": "a", "split": "test"}, ": split", "unknown split `test`"),
    ({"messages": "Hi."}, ": messages", "a string, not a list"),
    ({"messages": []}, ": messages", "an empty list"),
    ({"messages": ["Hi."]}, ": messages[0]", "a string, not an object"),
    ({"messages": [{"role": "user"}]}, ": messages[0]", "no `content`"),
    ({"messages": [USER | {"tool_calls": []}]}, ": messages[0]", "`tool_calls`"),
    ({"messages": [USER | {"role": "human"}]}, ": messages[0].role", "unknown role `human`"),
    ({"messages": [USER | {"content": [{"type": "text"}]}]}, ": messages[0].content", "a list, not a string"),
    ({"messages": [USER | {"content": ""}]}, ": messages[0].content", "empty"),
    ({"messages": [USER, {"role": "assistant", "content": "Hello."}]}, ": messages[1].role", "last message is from `assistant`"),
])
def test_a_row_that_cannot_be_used_is_named_by_file_line_and_field(tmp_path, row, field, what):
    file = write(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    error = refused(file)
    assert what in error.what
    assert error.where == f"{file}:2{field}"
    assert error.fix


def test_an_id_that_is_there_twice_is_refused_with_both_places(tmp_path):
    first = write(tmp_path / "a.jsonl", {"prompt": "a", "id": "same"})
    second = write(tmp_path / "b.jsonl", {"prompt": "b"}, {"prompt": "c", "id": "same"})
    error = refused(tmp_path)
    assert error.where == f"{second}:2: id" and f"{first}:1" in error.what


def test_a_topic_in_two_named_splits_is_refused_with_both_places(tmp_path):
    tea = {"prompt": "How do I make tea?", "topic": "tea"}
    file = write(tmp_path / "a.jsonl", tea | {"split": "train"}, tea | {"split": "report"})
    error = refused(file)
    assert error.where == f"{file}:2: split" and f"{file}:1" in error.what and "leak" in error.what


def test_a_source_without_prompts_is_refused(tmp_path):
    assert "no prompt file or folder" in refused(tmp_path / "absent.jsonl").what
    assert "holds no .jsonl or" in refused(tmp_path).what
    assert "not one prompt" in refused(write(tmp_path / "empty.jsonl", "", "  ")).what
    assert "`.txt`" in refused(write(tmp_path / "a.txt", "{}")).what


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert refused(file).where == f"{file}:2"


def test_the_demo_prompts_are_diverse_short_and_held_out_by_topic():
    prompts = load(DEMO)
    assert {name: len(prompts.split(name)) for name in ("train", "choose", "report")} == {"train": 2766, "choose": 48, "report": 48}
    topics = {name: {prompt.topic for prompt in prompts.split(name)} for name in ("train", "choose", "report")}
    assert {name: len(found) for name, found in topics.items()} == {"train": 461, "choose": 12, "report": 12}
    assert not topics["train"] & topics["choose"] and not (topics["train"] | topics["choose"]) & topics["report"]
    texts = [prompt.messages[0]["content"] for prompt in prompts.prompts]
    assert len({text.lower() for text in texts}) == len(texts)
    assert all(5 <= len(text.split()) <= 25 for text in texts)


def test_every_form_of_the_held_out_demo_prompts_is_trained_on():
    rows = [json.loads(line) for line in (DEMO / "short-requests.jsonl").read_text(encoding="utf-8").split("\n") if line]
    forms = {split: {row["form"] for row in rows if row["split"] == split} for split in ("train", "choose", "report")}
    assert len(forms["train"]) >= 12 and forms["choose"] | forms["report"] <= forms["train"]


def test_the_first_part_of_the_demo_train_split_is_as_diverse_as_the_whole():
    assert len({prompt.topic for prompt in load(DEMO).split("train", limit=200)}) > 100
