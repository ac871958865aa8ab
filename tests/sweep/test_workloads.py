import json
from collections import Counter

import numpy as np
import pytest

from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.experiment.sweep import Workload
from raysd.prompts.prompt_set import Prompt, PromptSet, load_prompts_of
from raysd.sweep.workloads import RandomPrompts, RealPrompts, WorkloadPrompt, ready_prompts, warm_up_prompts, workload_prompts
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def experiment(write_experiment):
    return load_experiment(write_experiment(sweep={"concurrency": [1, 2]}))


def random_workload(**values) -> Workload:
    return Workload(**{"name": "1k1k", "kind": "random", "isl": 1024, "osl": 1024} | values)


@pytest.fixture
def random_prompts(experiment, tokenizer) -> RandomPrompts:
    return ready_prompts(random_workload(), experiment, PromptSet(()), tokenizer)


def real(count: int, **values) -> RealPrompts:
    workload = Workload(name="real", **values)
    return RealPrompts(workload, tuple(WorkloadPrompt(f"p{number}", (number,), workload.osl, workload.ignore_eos is True, "even" if number % 2 == 0 else None) for number in range(count)))


def ids(drawn: list[WorkloadPrompt]) -> list[str]:
    return [prompt.id for prompt in drawn]


def test_lengths_are_uniform_from_the_ratio_to_the_longest_as_inferencex_has_it(random_prompts, tokenizer):
    template = len(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=False)) - 1
    drawn = workload_prompts(random_prompts, 64, 20000, 0, 0)
    for lengths, longest in (([len(prompt.token_ids) - template for prompt in drawn], 1024 - template), ([prompt.max_tokens for prompt in drawn], 1024)):
        lowest = int(0.8 * longest)
        assert (min(lengths), max(lengths)) == (lowest, longest)
        # the mean of 20,000 uniform draws of a width of 205 has a standard deviation of 0.42
        assert abs(np.mean(lengths) - (lowest + longest) / 2) < 2
    assert all(prompt.ignore_eos and prompt.category is None for prompt in drawn)
    assert len(set(ids(drawn))) == 20000


@pytest.mark.parametrize(("ratio", "lengths"), [(1.0, {40}), (0.0, set(range(1, 41)))])
def test_a_ratio_of_one_fixes_the_length_and_of_zero_leaves_any(experiment, tokenizer, ratio, lengths):
    prompts = ready_prompts(random_workload(osl=40, range_ratio=ratio), experiment, PromptSet(()), tokenizer)
    assert {prompt.max_tokens for prompt in workload_prompts(prompts, 1, 2000, 0, 0)} == lengths


def test_a_random_prompt_is_the_chat_template_around_ordinary_tokens(random_prompts, tokenizer):
    before, after = list(random_prompts.before), list(random_prompts.after)
    assert tokenizer.decode(before) == "<|start|>user\n" and tokenizer.decode(after) == "<|end|>\n<|start|>assistant\n"
    for prompt in workload_prompts(random_prompts, 4, 50, 0, 0):
        token_ids = list(prompt.token_ids)
        assert token_ids[:len(before)] == before and token_ids[-len(after):] == after
        assert not set(token_ids[len(before):-len(after)]) & set(tokenizer.all_special_ids)


def test_every_ordinary_token_comes_up_equally_often(random_prompts):
    counted = Counter(token for prompt in workload_prompts(random_prompts, 4, 2000, 0, 0) for token in prompt.token_ids[len(random_prompts.before):-len(random_prompts.after)])
    assert set(counted) == set(random_prompts.ordinary)
    assert max(counted.values()) < 1.15 * min(counted.values())


def test_prompts_follow_from_seed_workload_and_block_alone(random_prompts, experiment, tokenizer):
    drawn = workload_prompts(random_prompts, 4, 40, 1, 7)
    again = ready_prompts(random_workload(), experiment, PromptSet(()), tokenizer)
    assert workload_prompts(again, 4, 40, 1, 7) == drawn
    assert workload_prompts(again, 8, 80, 1, 7)[:40] == drawn, "the first of a larger concurrency are those of a smaller one"
    texts = [{prompt.token_ids for prompt in workload_prompts(prompts, 4, 40, block, seed)}
             for prompts, block, seed in ((again, 1, 7), (again, 2, 7), (again, 1, 8),
                                          (ready_prompts(random_workload(name="other"), experiment, PromptSet(()), tokenizer), 1, 7))]
    assert sum(map(len, texts)) == len(set().union(*texts)), "no prompt is shared"


def test_random_prompts_are_the_same_on_every_machine(random_prompts):
    # Written down once: a kept cell of an interrupted sweep is found again by its prompts.
    assert [(len(prompt.token_ids), prompt.max_tokens, prompt.token_ids[12]) for prompt in workload_prompts(random_prompts, 1, 3, 0, 0)] == EXPECTED_DRAW


EXPECTED_DRAW = [(939, 997, 154), (826, 837, 282), (827, 929, 253)]


def test_an_isl_that_the_template_fills_is_refused(experiment, tokenizer):
    with pytest.raises(ExperimentError, match="filled by the chat template alone") as caught:
        ready_prompts(random_workload(isl=8), experiment, PromptSet(()), tokenizer)
    assert caught.value.where == "sweep.workloads.1k1k.isl" and caught.value.exit_code == 64


def test_real_prompts_are_asked_once_each_before_one_comes_again():
    prompts = real(10)
    asked = [ids(workload_prompts(prompts, 2, 4, block, 0)) for block in range(5)]
    assert Counter(sum(asked, [])) == {f"p{number}": 2 for number in range(10)}
    assert len(set(asked[0] + asked[1] + asked[2][:2])) == 10, "five blocks of four go through all ten twice"
    assert len({tuple(block) for block in asked}) == 5


def test_blocks_that_need_all_prompts_ask_them_in_other_orders():
    prompts = real(12)
    asked = [ids(workload_prompts(prompts, 4, 24, block, 0)) for block in range(3)]
    assert all(Counter(block) == {f"p{number}": 2 for number in range(12)} for block in asked)
    assert len({tuple(block) for block in asked}) == 3 and asked[0][:12] != asked[0][12:]
    assert ids(workload_prompts(prompts, 4, 24, 0, 1)) != asked[0]


@pytest.mark.parametrize(("prompts", "concurrency", "count"), [(10, 4, 4), (10, 4, 8), (10, 10, 10), (7, 2, 3), (48, 8, 32), (1, 1, 1), (5, 1, 5)])
def test_no_prompt_comes_twice_in_a_cell_that_there_are_enough_for(prompts, concurrency, count):
    for seed in range(20):
        asked = [ids(workload_prompts(real(prompts), concurrency, count, block, seed)) for block in range(12)]
        assert all(len(set(block)) == count for block in asked)
        row = sum(asked, [])
        assert all(len(set(row[start:start + prompts])) == prompts for start in range(0, len(row) - prompts, prompts)), "each comes once in each shuffle"


@pytest.mark.parametrize(("prompts", "concurrency", "count", "apart"), [(10, 4, 16, 7), (10, 10, 40, 10), (7, 2, 8, 5), (12, 8, 80, 10), (9, 1, 10, 5), (1, 1, 4, 1), (2, 1, 5, 2)])
def test_a_prompt_comes_again_only_after_more_others_than_are_in_flight(prompts, concurrency, count, apart):
    assert apart >= concurrency
    for seed in range(20):
        for block in range(6):
            asked = ids(workload_prompts(real(prompts), concurrency, count, block, seed))
            last: dict[str, int] = {}
            for turn, prompt in enumerate(asked):
                assert turn - last.get(prompt, -prompts) >= apart
                last[prompt] = turn


def test_no_place_in_the_order_is_kept_for_a_prompt():
    first_of_second = Counter(ids(workload_prompts(real(6), 2, 12, 0, seed))[6] for seed in range(1200))
    assert set(first_of_second) == {f"p{number}" for number in range(6)} and max(first_of_second.values()) < 1.4 * min(first_of_second.values())


def test_real_prompts_are_the_same_on_every_machine():
    # Written down once: a kept cell of an interrupted sweep is found again by its prompts.
    assert ids(workload_prompts(real(6), 2, 8, 1, 7)) == EXPECTED_ORDER


EXPECTED_ORDER = ["p1", "p2", "p5", "p4", "p0", "p2", "p5", "p1"]


def test_two_other_random_prompts_a_slot_warm_an_engine_up_and_no_real_ones(random_prompts):
    warm_up = warm_up_prompts(random_prompts, 4, 0)
    assert len(warm_up) == 8 and not {prompt.token_ids for prompt in warm_up} & {prompt.token_ids for block in range(3) for prompt in workload_prompts(random_prompts, 4, 40, block, 0)}
    assert warm_up_prompts(real(4), 4, 0) == []


def test_category_and_length_go_with_the_prompt():
    drawn = workload_prompts(real(4, osl=9, ignore_eos=True), 1, 4, 0, 0)
    assert {(prompt.id, prompt.category) for prompt in drawn} == {("p0", "even"), ("p1", None), ("p2", "even"), ("p3", None)}
    assert {(prompt.max_tokens, prompt.ignore_eos) for prompt in drawn} == {(9, True)}


def test_more_requests_in_flight_than_prompts_are_refused():
    with pytest.raises(ExperimentError, match="real has 3 prompts, and 4 are to be in flight at once") as caught:
        workload_prompts(real(3), 4, 8, 0, 0)
    assert caught.value.where == "sweep.concurrency" and "prompts.path" in caught.value.fix


def write_rows(path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_own(write_experiment, tmp_path, *rows: dict, **workload):
    write_rows(tmp_path / "mine.jsonl", *rows)
    return load_experiment(write_experiment(sweep={"concurrency": [1], "workloads": [{"name": "report", "osl": 16}, {"name": "mine", "prompts": "mine.jsonl", "osl": 32, **workload}]}))


def test_a_workload_may_have_prompts_of_its_own(write_experiment, tmp_path, tokenizer):
    experiment = with_own(write_experiment, tmp_path, {"prompt": "Add 2 and 3.", "category": "math"}, {"prompt": "Learned.", "split": "train"}, {"prompt": "Hi.", "split": "report"})
    assert experiment.sweep.workloads[1].prompts == tmp_path / "mine.jsonl", "relative to the experiment's file"
    prompts = load_prompts_of(experiment)
    own, report = (ready_prompts(workload, experiment, prompts, tokenizer) for workload in experiment.sweep.workloads[::-1])
    assert [(prompt.id, prompt.category, prompt.max_tokens) for prompt in own.prompts] == [("mine.jsonl:1", "math", 32), ("mine.jsonl:3", None, 32)]
    assert ids(report.prompts)[:2] == ["ferries-short", "ferries-long"]
    assert tokenizer.decode(own.prompts[0].token_ids) == "<|start|>user\nAdd 2 and 3.<|end|>\n<|start|>assistant\n"


def test_a_prompt_that_the_draft_has_seen_is_refused(write_experiment, tmp_path):
    experiment = with_own(write_experiment, tmp_path, {"prompt": "Fine."}, {"prompt": "Tell me about rain, short."})
    with pytest.raises(ExperimentError, match=r"`mine.jsonl:2` is also `rain-short` of the split `train`"):
        load_prompts_of(experiment)


def test_no_prompt_left_is_an_error_of_the_field(write_experiment, tmp_path):
    for rows, what in (((), "there is not one prompt in it"), (({"prompt": "Learned.", "split": "train"},), "names a split other than `report`")):
        with pytest.raises(ExperimentError, match=what) as caught:
            load_prompts_of(with_own(write_experiment, tmp_path, *rows))
        assert "sweep.workloads.mine.prompts" in caught.value.where


def test_a_prompt_without_room_for_its_answer_is_refused(experiment, tokenizer):
    long = PromptSet((Prompt("long", ({"role": "user", "content": "a b c " * 100},), "t", "report"),))
    with pytest.raises(ExperimentError, match="`long` has .* tokens, and 384 leave room"):
        ready_prompts(Workload(osl=128), experiment, long, tokenizer)
