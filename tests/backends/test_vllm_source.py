"""What is read from the installed vLLM's source is what vLLM says itself, and needs no import."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from raysd.backends import vllm_source  # noqa: E402
from raysd.backends.vllm_probe import InstalledVllm  # noqa: E402


def test_names_are_those_of_the_imported_vllm():
    import dataclasses

    from vllm import envs
    from vllm.config.speculative import SpeculativeConfig

    probe = InstalledVllm()
    assert probe.environment_names == set(envs.environment_variables)
    assert probe.speculative_fields == {field.name for field in dataclasses.fields(SpeculativeConfig)}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "MiniMaxM2ForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM"])
def test_a_model_takes_a_draft_if_vllm_says_so(architecture: str):
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    assert InstalledVllm().takes_eagle3(architecture) == supports_eagle3(ModelRegistry._try_load_model_cls(architecture))


def test_a_model_that_vllm_does_not_have_is_not_told_of():
    assert InstalledVllm().takes_eagle3("NoSuchForCausalLM") is None
    assert vllm_source.inherits("NoSuchForCausalLM", "SupportsEagle3") is None


def test_nothing_of_it_imports_vllm():
    code = ("import sys; from raysd.backends.vllm_probe import InstalledVllm; probe = InstalledVllm(); probe.speculative_fields; probe.environment_names; "
            "probe.takes_eagle3('LlamaForCausalLM'); print('vllm' in sys.modules, 'torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
