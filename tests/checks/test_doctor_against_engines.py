"""The doctor's word on KV caches against what vLLM's engines do: on CPU, latent attention clashes with grouped attention as AITER's MLA did on GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from raysd.backends.vllm_probe import InstalledVllm, installed_version
from raysd.backends.vllm_server import start_server
from raysd.checks.doctor import facts_of
from raysd.checks.facts import Facts
from raysd.checks.findings import Finding
from raysd.checks.gpu_memory import draft_ranks
from raysd.checks.model_bytes import draft_bytes, target_bytes
from raysd.checks.registry import examine
from raysd.draft.checkpoint import save_draft
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import draft_shape
from raysd.errors import EngineError
from raysd.experiment import load_experiment
from raysd.experiment.draft import DraftSection
from raysd.sweep.engine import engine_spec
from raysd.target.shape import read_shape
from tests.tiny_drafts import lively
from tests.tiny_models import tiny_deepseek, tiny_llama

CACHE_BYTES = 2**26
CACHE_LINE = re.compile(r"CPU KV cache size: ([0-9,]+) tokens")


def draft_beside(target: Path, folder: Path, section: DraftSection) -> Path:
    """A draft of the target's sizes, with random weights."""
    shape = read_shape(target)
    sizes = draft_shape(section, shape)
    draft = lively(Eagle3Draft(sizes, torch.randn(shape.vocab_size, shape.hidden_size), torch.arange(sizes.vocab_size)))
    save_draft(draft, folder, torch.bfloat16)
    return folder


def experiment_of(folder: Path, target: Path, draft: Path, **target_fields) -> Path:
    """An experiment that serves the draft beside the target on CPU."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "topic": f"t{n}", "prompt": "bada"}) + "\n" for n in range(20)))
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({
        "name": "tiny", "store": "runs", "target": {"model": str(target), "max_model_len": 128, **target_fields}, "prompts": {"path": "prompts.jsonl"},
        "draft": {"checkpoint": str(draft)}, "sweep": {"arms": ["none", "bf16"], "k": [2], "engine": {
            "enforce_eager": True, "kv_cache_bytes": CACHE_BYTES, "max_num_seqs": 8, "draft_args": {"draft_tensor_parallel_size": 1}}}}))
    return path


def examined(path: Path) -> tuple[Facts, dict[str, Finding]]:
    facts = facts_of(load_experiment(path), None, installed_version(), InstalledVllm())
    return facts, {finding.code: finding for finding in examine(facts)}


def cache_tokens(facts: Facts, log: Path) -> int:
    """How many tokens the engine's KV cache holds, by its log; the engine is started and stopped. Raises EngineError as it does."""
    experiment = facts.experiment
    with start_server(engine_spec(experiment, Path(experiment.target.model), experiment.draft.checkpoint, 2), log):
        pass
    return int(CACHE_LINE.search(log.read_text()).group(1).replace(",", ""))


def foretold_tokens(facts: Facts) -> int:
    engine, ranks = facts.engines[0], facts.experiment.target.tensor_parallel
    target, draft = target_bytes(facts.target, "bfloat16", "auto"), draft_bytes(facts.draft_config, facts.target, "bfloat16", "auto")
    return CACHE_BYTES // (target.kv_of_rank(ranks) + draft.kv_of_rank(draft_ranks(facts, engine, ranks)))


@pytest.fixture(scope="module")
def latent_target(tmp_path_factory) -> Path:
    return tiny_deepseek(tmp_path_factory.mktemp("models") / "target")


def test_a_grouped_draft_beside_a_latent_target_is_refused_by_the_doctor_as_by_the_engine(latent_target, tmp_path):
    draft = draft_beside(latent_target, tmp_path / "draft", DraftSection(attention="grouped", head_dim=32, vocab_size=None))
    facts, findings = examined(experiment_of(tmp_path, latent_target, draft))
    if InstalledVllm().cpu_latent_backend() == "AMX_MLA":  # a CPU whose latent attention takes other blocks
        assert "kv-block-clash" not in findings
        assert cache_tokens(facts, tmp_path / "engine.log") > 0
        return
    clash = findings["kv-block-clash"]
    words = "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])"
    assert clash.severity == "error" and words in clash.message and "the target's attention runs on CPU_MLA" in clash.message
    assert "Eagle3DeepseekV2ForCausalLM" in clash.fix
    with pytest.raises(EngineError, match=re.escape(words)):
        cache_tokens(facts, tmp_path / "engine.log")


def test_a_latent_draft_beside_a_latent_target_passes_the_doctor_and_starts(latent_target, tmp_path):
    draft = draft_beside(latent_target, tmp_path / "draft", DraftSection(attention="latent", vocab_size=None))
    facts, findings = examined(experiment_of(tmp_path, latent_target, draft))
    assert not [finding for finding in findings.values() if finding.severity == "error"]
    assert cache_tokens(facts, tmp_path / "engine.log") == pytest.approx(foretold_tokens(facts), rel=0.01)


@pytest.mark.slow
def test_two_ranks_share_the_cache_of_the_draft_though_it_is_asked_to_be_whole_on_each(tmp_path):
    target = tiny_llama(tmp_path / "target")
    facts, findings = examined(experiment_of(tmp_path, target, draft_beside(target, tmp_path / "draft", DraftSection(vocab_size=None)), tensor_parallel=2))
    assert not [finding for finding in findings.values() if finding.severity == "error"]
    assert cache_tokens(facts, tmp_path / "engine.log") == pytest.approx(foretold_tokens(facts), rel=0.01)
