"""The stage against two real vLLM engines: a tiny random target, alone and with a random draft."""

import contextlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import pytest

from raysd.backends.sweep_nodes import open_nodes
from raysd.errors import EngineError, StageError
from raysd.experiment import Experiment
from raysd.experiment.draft import DraftSection
from raysd.experiment.sweep import SweepSection
from raysd.load.ask import ask_json
from raysd.prompts.prompt_set import load_prompts
from raysd.sweep import tables
from raysd.sweep.bench import draft_folder
from raysd.sweep.engine import engine_spec
from raysd.sweep.lossless import distribution_p_value, served_gap
from raysd.sweep.served import make_served_acceptance
from raysd.sweep.sweep import sweep
from raysd.target import load_tokenizer
from tests.servers import Shared, start_servers
from tests.stage_runs import attempt, piece
from tests.tiny_chain import UNHURRIED
from tests.tiny_models import tiny_llama

CELLS, REQUESTS = 12, 36  # 2 arms x concurrency 1 and 2 x 3 blocks, 2 requests a slot


@dataclass
class Engines:
    experiment: Experiment
    target: Path
    none: object
    bf16: object

    @contextlib.contextmanager
    def start(self, spec, log_path):
        """A StartServer that hands out the engines that are already up; their life is tested in tests/backends."""
        yield self.none if spec.draft is None else self.bf16

    def launch(self, spec, log_path):
        """The same as a Launch."""
        return Shared(self.none if spec.draft is None else self.bf16)

    def nodes(self, run):
        """An OpenNodes."""
        return open_nodes(run, self.launch)


def tiny_draft(folder: Path, target: Path) -> Path:
    """A draft with random weights that proposes the target's first 384 tokens."""
    import torch

    from raysd.draft.checkpoint import save_draft
    from raysd.draft.model import Eagle3Draft
    from raysd.draft.shape import draft_shape
    from raysd.target import read_shape

    shape = draft_shape(DraftSection(vocab_size=384, aux_layers=[1, 2, 3]), read_shape(target))
    torch.manual_seed(0)
    save_draft(Eagle3Draft(shape, torch.randn(shape.target_vocab_size, shape.hidden_size), torch.arange(shape.vocab_size)), folder, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    target = tiny_llama(folder / "target")
    draft = tiny_draft(folder / "draft", target)
    rows = [{"id": f"q{index}", "topic": "t", "split": "report", "prompt": f"bado {index} kela"} | ({"category": "odd"} if index % 2 else {}) for index in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = Experiment.model_validate({
        "name": "tiny", "target": {"model": str(target), "max_model_len": 256}, "prompts": {"path": str(folder / "prompts.jsonl")},
        "draft": {"checkpoint": str(draft)},
        "sweep": UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1, 2], "k": [2], "requests_per_slot": 2, "workloads": [{"osl": 12}], "answer_tokens": 12,
                  "engine": {"max_num_seqs": 4, "enforce_eager": True, "kv_cache_bytes": 2**26, "start_timeout_s": 300}}})
    specs = [engine_spec(experiment, target, None, None), engine_spec(experiment, target, draft, 2)]
    with start_servers([(spec, folder / f"{index}.log") for index, spec in enumerate(specs)]) as servers:
        yield Engines(experiment, target, *servers)


def test_a_sweep_that_was_killed_goes_on_where_it_was(engines, tmp_path):
    store, measured = tmp_path / "store", []

    def dies_at_the_sixth_cell(doing, *progress, **figures):
        if "block" in doing:
            measured.append(doing)
        if len(measured) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), attempt(store, engines.experiment, progress=dies_at_the_sixth_cell) as run:
        sweep(run, engines.nodes)
    assert not list(run.out.rglob("*.parquet")) and not [thread for thread in threading.enumerate() if thread.name.startswith("sweep on")]
    told = []
    with attempt(store, engines.experiment, progress=lambda doing, *progress, **figures: told.append(doing)) as run:
        metrics = sweep(run, engines.nodes)
    again = [doing for doing in told if "block" in doing]
    assert len(again) == CELLS - 5 and not set(again) & set(measured[:5])  # also the fifth, whose comparison had only begun
    assert not [doing for doing in told if "answers the" in doing]
    check(metrics, run.out, {None: engines.none, 2: engines.bf16})
    cells, answers = whole_cells(run.out), (run.out / "answers.parquet").read_bytes()
    told.clear()
    with attempt(store, engines.experiment, progress=lambda doing, *progress, **figures: told.append(doing)) as run:  # killed before it was published
        sweep(run, engines.nodes)
    assert not told, "not even an engine is started"
    assert whole_cells(run.out) == cells and (run.out / "answers.parquet").read_bytes() == answers
    assert json.loads((run.out / "provenance.json").read_text())["nodes"]


def whole_cells(out: Path) -> list[dict]:
    return tables.read_rows(out / "cells", list(tables.CELLS))


def check(metrics: dict, out: Path, servers: dict) -> None:
    json.dumps(metrics)
    assert metrics["cells"] == metrics["valid_cells"] == CELLS
    assert metrics["lossless"]["bf16"]["broken"] == 0 and sum(metrics["lossless"]["bf16"].values()) == 5
    assert metrics["acceptance"]["bf16"]["k"] == 2 and 1 <= metrics["acceptance"]["bf16"]["acceptance_length"] <= 3
    cells = whole_cells(out)
    assert {path.parent.relative_to(out).as_posix() for path in out.rglob("part-0.parquet")} == {
        f"{table}/arm={arm}/workload=report" for table in ("cells", "requests") for arm in ("none", "bf16")}
    in_turn = [(cell["arm"], cell["concurrency"], cell["block"]) for cell in sorted(cells, key=lambda cell: cell["started_s"])]
    assert in_turn == [(arm, c, block) for block in range(3) for c in (1, 2) for arm in (("none", "bf16") if block != 1 else ("bf16", "none"))]
    for cell in cells:
        assert cell["requests"] == 2 * cell["concurrency"] and cell["failures"] == 0 and cell["valid"] and cell["invalid_reasons"] == []
        assert cell["output_tok_s"] > 0 and cell["window_output_tok_s"] > 0 and cell["ttft_ms_p50"] > 0 and cell["schema_version"] == tables.SCHEMA_VERSION
        assert cell["workload"] == "report" and cell["node"]
        if cell["arm"] == "none":
            assert cell["k"] is None and cell["drafts"] == 0 and cell["acceptance_length"] is None
        else:
            assert cell["k"] == 2 and cell["draft_tokens"] == 2 * cell["drafts"] > 0 and sum(cell["per_position"]) == cell["accepted"]
            # every answer starts with a token of the prefill; each verify step then adds its accepted tokens and one of its own
            assert abs(cell["drafts"] + cell["accepted"] + cell["requests"] - cell["output_tokens"]) <= 3 * cell["requests"]
    requests = tables.read_rows(out / "requests", list(tables.REQUESTS))
    assert len(requests) == REQUESTS
    for request in requests:
        assert sum(request["chunk_tokens"]) == request["output_tokens"] <= 12 and request["dispatched_ms"] <= request["chunk_ms"][0] <= request["ended_ms"]
    for cell in cells:
        assert cell["acceptance"] == "real" and cell["energy_j"] is None
        of_cell = [row for row in requests if all(row[name] == cell[name] for name in ("arm", "k", "concurrency", "block"))]
        if cell["arm"] == "none":
            assert {(row["drafts"], row["accepted"]) for row in of_cell} == {(None, None)}
        else:
            assert sum(row["drafts"] for row in of_cell) == cell["drafts"] and sum(row["accepted"] for row in of_cell) == cell["accepted"]
    assert {(row["prompt_id"], row["category"]) for row in requests} == {(f"q{index}", ("odd" if index % 2 else None)) for index in range(5)}
    seen = pyarrow.parquet.read_table(out / "telemetry.parquet").to_pylist()
    assert seen and {(row["source"], row["device"]) for row in seen} == {("host", "host")} and all(0 <= row["cpu_frac"] <= 1 and row["memory_used_bytes"] > 0 for row in seen)
    by_block = {(row["block"], row["concurrency"], row["arm"]): [] for row in requests}
    for row in requests:
        by_block[row["block"], row["concurrency"], row["arm"]].append(row["prompt_id"])
    assert all(by_block[block, c, "none"] == by_block[block, c, "bf16"] for block in range(3) for c in (1, 2))
    assert by_block[0, 1, "none"] != by_block[1, 1, "none"]
    answers = pyarrow.parquet.read_table(out / "answers.parquet").to_pylist()
    assert {(row["arm"], row["k"], row["prompt_id"]) for row in answers} == {(arm, k, f"q{i}") for arm, k in (("none", None), ("bf16", 2)) for i in range(5)}
    assert pyarrow.parquet.read_table(out / "lossless.parquet").num_rows == 5 and pyarrow.parquet.read_table(out / "acceptance.parquet").num_rows == 1
    [facts] = json.loads((out / "provenance.json").read_text())["nodes"].values()
    assert facts["engines"]["bf16-k2"]["command"] == servers[2].command and facts["residency"]["together"]


def test_random_prompts_and_their_answers_are_as_long_as_they_were_asked_to_be(engines, tmp_path):
    section = SweepSection.model_validate(engines.experiment.sweep.model_dump() | {"concurrency": [2], "requests_per_slot": 4, "workloads": [{"name": "r", "kind": "random", "isl": 64, "osl": 10}]})
    with attempt(tmp_path / "store", engines.experiment.model_copy(update={"sweep": section})) as run:
        sweep(run, engines.nodes)
    cells, requests = whole_cells(run.out), tables.read_rows(run.out / "requests", list(tables.REQUESTS))
    assert [(cell["valid"], cell["invalid_reasons"], cell["requests"]) for cell in cells] == [(True, [], 20)] * 6
    asked = {row["prompt_id"]: (row["prompt_tokens"], row["output_tokens"]) for row in requests}
    assert len(asked) == 60 and len(requests) == 120, "the same for both arms, others in each block"
    template = 12
    assert all(int(0.8 * (64 - template)) + template <= isl <= 64 and 8 <= osl <= 10 for isl, osl in asked.values())
    assert len({isl for isl, _ in asked.values()}) > 5 and {osl for _, osl in asked.values()} == {8, 9, 10}
    assert all(asked[row["prompt_id"]] == (row["prompt_tokens"], row["output_tokens"]) for row in requests)


def test_the_gap_is_what_the_target_says(engines):
    """Against the log-probabilities that transformers computes from the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engines.target, dtype=torch.bfloat16)
    prompt = [1, 40, 41, 42, 43]
    logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
    likely, unlikely = logprobs.argmax().item(), logprobs.argmin().item()
    gap = served_gap(engines.none.address, engines.none.model)
    assert gap(prompt, likely, likely) == 0
    assert gap(prompt, likely, unlikely) == pytest.approx((logprobs[likely] - logprobs[unlikely]).item(), abs=0.5)
    assert gap(prompt, likely, unlikely) > 2


def sampled(server, answers: int, temperature: float) -> list[list[int]]:
    """As many answers of three tokens to one prompt."""
    body = {"model": server.model, "prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": temperature, "n": answers, "ignore_eos": True, "return_token_ids": True}
    return [choice["token_ids"] for choice in ask_json(server.address, "/v1/completions", body)["choices"]]


def test_a_draft_does_not_change_the_distribution_of_sampled_answers(engines):
    """The first token is sampled before there is a draft, the others are judged with one. The temperature is low, so that few tokens are likely and a wrong one shows."""
    before = engines.bf16.counters().acceptance
    none, bf16 = (sampled(server, 500, 0.3) for server in (engines.none, engines.bf16))
    assert (engines.bf16.counters().acceptance - before).drafts >= 500
    p_values = [distribution_p_value([answer[place] for answer in none], [answer[place] for answer in bf16]) for place in range(3)]
    assert min(p_values) > 1e-4, p_values
    sharper = sampled(engines.bf16, 500, 0.15)
    assert distribution_p_value([answer[1] for answer in none], [answer[1] for answer in sharper]) < 1e-4, "the test would find another temperature"


def test_served_acceptance_counts_what_the_engine_counted(engines, tmp_path):
    experiment = engines.experiment
    prompts = load_prompts(experiment.prompts).split("report")
    served = make_served_acceptance(experiment, engines.target, load_tokenizer(engines.target, experiment.target), engines.start, tmp_path, lambda *doing, **figures: None, 16)
    before = engines.bf16.counters().acceptance
    counts = served(experiment.draft.checkpoint, prompts, 2)
    assert counts == engines.bf16.counters().acceptance - before
    assert counts.draft_tokens == 2 * counts.drafts > 0 and counts.accepted == sum(counts.per_position)


def test_an_engine_that_never_drafts_is_found_before_the_cells(engines, tmp_path):
    """The baseline handed out in the place of the only draft's engine: its numbers would be a lie, and there is nothing else to compare."""
    with pytest.raises(EngineError, match="bf16-k2 answered 5 prompts and counted no draft"), attempt(tmp_path, engines.experiment) as run:
        sweep(run, lambda run: open_nodes(run, lambda spec, log_path: Shared(engines.none)))
    assert not piece(tmp_path, "answers").exists() and not piece(tmp_path, "cells").exists()


def test_an_arm_without_its_draft_is_an_error_that_names_the_stage(engines, tmp_path):
    experiment = engines.experiment.model_copy(update={"draft": DraftSection()})
    assert draft_folder(experiment, {}, "none") is None
    with pytest.raises(StageError, match="the arm bf16 has no draft: the stage train"):
        draft_folder(experiment, {}, "bf16")
    with pytest.raises(StageError, match="holds no draft"):
        draft_folder(experiment, {"quantize": tmp_path}, "fp8")
