"""A draft's rope is one that vLLM knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysd.checks.draft_fit import check_draft_fit
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import CONFIG, LATENT, LATENT_ATTENTION, tensors, write

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 10000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": None, "mscale": 0.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"rope_scaling": {"type": "su"} | FACTORS},
        {"rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.5, "short_factor": [1.0] * 4, "long_factor": [1] * 4}},
    ],
)
def test_what_vllm_rotates_by_fits(tmp_path: Path, target, config: dict[str, Any]):
    check_draft_fit(write(tmp_path / "draft", CONFIG | config), target)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type is 'spiral', not one of default, linear"),
        ({"rope_parameters": {"type": ["yarn"]}}, "rope_type is .'yarn'., not one of"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], not an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "another one for each kind of layer .full_attention"),
        ({"rope_scaling": {"type": "linear"}}, "of the type linear and has no factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "has no high_freq_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "has no long_factor"),
        ({"rope_scaling": {"type": "longrope"} | FACTORS | {"short_factor": [1.0] * 7}}, "short_factor is .*the 8 pairs"),
        ({"rope_scaling": {"type": "longrope"} | FACTORS | {"long_factor": 2.0}}, "long_factor is 2.0"),
        ({"rope_scaling": {"type": "longrope"} | FACTORS | {"long_factor": ["2"] * 8}}, "long_factor is"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4', not a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}}, "mscale is '1', not a number"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, not a share"),
    ],
)
def test_what_vllm_would_not_rotate_by_is_refused(tmp_path: Path, target, config: dict[str, Any], words: str):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", CONFIG | config), target)


def test_an_mla_draft_has_yarn_or_none(tmp_path: Path, target):
    """vLLM takes every other type for YaRN."""
    yarn = CONFIG | LATENT | {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    check_draft_fit(write(tmp_path / "draft", yarn, tensors(LATENT_ATTENTION)), target)
    with pytest.raises(ExperimentError, match="rope_type is 'linear', not one of default, yarn"):
        check_draft_fit(write(tmp_path / "draft", yarn | {"rope_scaling": {"type": "linear", "factor": 4.0}}, tensors(LATENT_ATTENTION)), target)
