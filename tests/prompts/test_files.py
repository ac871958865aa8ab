import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from raysd.errors import ExperimentError
from raysd.experiment.prompts import PromptsSection
from raysd.prompts.prompt_set import Prompt, load_prompts


def load(path: Path) -> list[Prompt]:
    return list(load_prompts(PromptsSection(path=path)).prompts)


def said(path: Path) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in load(path)]


def refused(path: Path) -> ExperimentError:
    with pytest.raises(ExperimentError) as caught:
        load(path)
    assert caught.value.exit_code == 64
    return caught.value


def parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_category_is_kept_and_may_be_absent(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "Add 2 and 3.", "category": "math"}\n{"prompt": "Hi."}\n')
    assert [prompt.category for prompt in load(tmp_path / "a.jsonl")] == ["math", None]


SHAREGPT = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "What is rain?"}, {"from": "gpt", "value": "Water."}, {"from": "human", "value": "Why?"}]},
    {"id": "a_0", "conversations": [{"from": "gpt", "value": "...and so on."}, {"from": "human", "value": "Go on."}]},
    {"id": "b_0", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Name a river."}, {"from": "gpt", "value": "Rhine."}]},
    {"id": "c_0", "conversations": []},
    {"id": "d_0", "conversations": [{"from": "gpt", "value": "Left over."}]},
]


def test_of_recorded_conversations_the_first_thing_that_a_person_asks_is_the_prompt(tmp_path):
    file = tmp_path / "ShareGPT_V3.json"
    file.write_text(json.dumps(SHAREGPT))
    prompts = load(file)
    assert [prompt.messages[-1] for prompt in prompts] == [{"role": "user", "content": text} for text in ("What is rain?", "Go on.", "Name a river.")]
    assert [prompt.id for prompt in prompts] == ["ShareGPT_V3.json:1", "ShareGPT_V3.json:2", "ShareGPT_V3.json:3"], "its own ids are there twice"
    assert prompts[2].messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(("conversation", "place", "what"), [
    ({"conversations": "Hi."}, ":2: conversations", "a string, not a list"),
    ({"conversations": [{"from": "human"}]}, ":2: conversations[0]", "no `from` and `value`"),
])
def test_a_conversation_that_is_none_is_named(tmp_path, conversation, place, what):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([SHAREGPT[0], conversation]))
    error = refused(file)
    assert what in error.what and error.where == f"{file}{place}"


def test_a_json_file_is_a_list(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "Hi."}')
    assert "an object, not a list" in refused(tmp_path / "a.json").what
    (tmp_path / "a.json").write_text('{"prompt": "Hi."}\n{"prompt": "Hello."}')
    assert "not JSON" in refused(tmp_path / "a.json").what


def test_beside_data_a_json_file_describes_it(tmp_path):
    (tmp_path / "dataset_info.json").write_text('[{"description": "no prompt"}]')
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi."}\n')
    assert said(tmp_path) == ["Hi."]


QUESTIONS = [{"question_id": f"q{number}", "category": category, "sub_category": "-", "turns": [f"Question {number}.", "And then?"], "source": "s", "src_id": str(number),
              "difficulty": None, "multiturn": True} for number, category in enumerate(["coding", "math", "coding"])]


def test_a_folder_of_speed_bench_gives_first_turns_with_their_category(tmp_path):
    parquet(tmp_path / "SPEED-Bench" / "qualitative" / "test-00000-of-00001.parquet", QUESTIONS)
    prompts = load(tmp_path / "SPEED-Bench" / "qualitative")
    assert [(prompt.id, prompt.category, prompt.messages[-1]["content"]) for prompt in prompts] == [
        ("q0", "coding", "Question 0."), ("q1", "math", "Question 1."), ("q2", "coding", "Question 2.")]
    assert "its folders qualitative do" in refused(tmp_path / "SPEED-Bench").what.replace("but ", "")


def test_a_subset_as_speed_benchs_script_prepares_it_reads_the_same(tmp_path):
    parquet(tmp_path / "qualitative.parquet", QUESTIONS)
    rows = [{key: value for key, value in row.items() if key != "turns"} | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]} for row in QUESTIONS]
    (tmp_path / "qualitative.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "qualitative.jsonl") == load(tmp_path / "qualitative.parquet")


def test_a_question_that_its_licence_withholds_is_refused_and_not_asked(tmp_path):
    withheld = QUESTIONS[1] | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}
    error = refused(parquet(tmp_path / "a.parquet", [QUESTIONS[0], withheld]))
    assert "licence" in error.what and error.where.endswith("a.parquet:2: turns") and "preparation script" in error.fix


def test_a_conversation_of_the_users_own_with_a_question_id_is_asked_as_a_whole(tmp_path):
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "What is rain?"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"question_id": 7, "messages": messages}) + "\n")
    assert load(tmp_path / "a.jsonl")[0].messages == tuple(messages)


def test_a_parquet_table_of_messages_is_read_like_lines_of_json(tmp_path):
    rows = [{"id": "x", "topic": "tea", "split": "report", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]},
            {"id": "y", "topic": None, "split": "report", "messages": [{"role": "user", "content": "What is tea?"}]}]
    prompts = load(parquet(tmp_path / "a.parquet", rows))
    assert prompts[0] == Prompt("x", tuple(rows[0]["messages"]), "tea", "report")
    assert prompts[1] == Prompt("y", tuple(rows[1]["messages"]), "y", "report")


def test_a_csv_table_keeps_every_prompt_as_the_text_that_it_is(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,category,note\n007,numbers,1\n"Two lines,\nand a ""quote"".",,2\nnull,numbers,3\n')
    assert [(prompt.messages[0]["content"], prompt.category) for prompt in load(tmp_path / "a.csv")] == [
        ("007", "numbers"), ('Two lines,\nand a "quote".', None), ("null", "numbers")]


def test_a_row_of_a_table_without_a_prompt_is_named_by_its_number(tmp_path):
    error = refused(parquet(tmp_path / "a.parquet", [{"prompt": "Hi."}, {"prompt": None}]))
    assert error.where.endswith("a.parquet:2") and "neither `prompt` nor `messages`" in error.what


def test_a_table_without_prompts_says_which_columns_it_has(tmp_path):
    assert "it has question, answer" in refused(parquet(tmp_path / "a.parquet", [{"question": "a", "answer": "b"}])).what


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_damaged_table_is_an_error_of_the_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"" if name.endswith("csv") else b"PAR1 but not for long")
    error = refused(tmp_path / name)
    assert "cannot be read" in error.what and name in error.where
