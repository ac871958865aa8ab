"""A config.json of a wrong form is refused where it is read, and what passes makes no check fall over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysd.checks.config_forms import check_forms
from raysd.checks.doctor import facts_of
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.target.known import known_draft, known_target
from tests.checks.doctor_facts import arguments, found
from tests.conftest import CONFIG

ODD = [None, "x", 0, -1, 1.5, True, [], {}, ["a"], {"a": 1}, [None]]
TARGET = known_target("amd/Kimi-K2.5-MXFP4").config | {"architectures": ["X"], "text_config": None, "index_topk": None}
DRAFT = known_draft("kimi-k2.5-eagle3") | {"transformer_layer_config": None, "kv_lora_rank": None, "fc_norm": None}
QUARK = {"quant_method": "quark", "exclude": ["fc"], "export": {}, "algo_config": [], "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}, "kv_cache_quant_config": {}}


@pytest.mark.parametrize(("config", "words"), [
    ({"text_config": "x"}, "text_config = 'x', not an object"),
    ({"quantization_config": ["fp8"]}, "quantization_config = ['fp8'], not an object"),
    ({"quantization_config": {"global_quant_config": {"weight": 3}}}, "quantization_config.global_quant_config.weight = 3, not an object, or a list of them"),
    ({"quantization_config": {"exclude": "fc"}}, "quantization_config.exclude = 'fc', not a list of names"),
    ({"quantization_config": {"weight_block_size": [128]}}, "weight_block_size = [128], not two counts"),
    ({"quantization_config": {"config_groups": {"group_0": 4}}}, "config_groups = {'group_0': 4}, not an object of objects"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0, not a count"),
    ({"text_config": {"num_key_value_heads": True}}, "text_config.num_key_value_heads = True, not a count"),
    ({"architectures": ["A", None]}, "not a list of names"),
])
def test_a_wrong_form_is_named_with_its_place(config: dict[str, Any], words: str):
    with pytest.raises(ExperimentError) as refused:
        check_forms(config, "target.model: /models/target")
    assert words in refused.value.what and refused.value.where == "target.model: /models/target"


def configs(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with one thing in it replaced."""
    for value in ODD:
        yield from (whole | {name: value} for name in whole)
        yield from (whole | {"quantization_config": QUARK | {name: value}} for name in QUARK)
        yield whole | {"quantization_config": QUARK | {"global_quant_config": {"weight": value}}}


@pytest.mark.parametrize("facts", ["target", "draft"])
def test_what_passes_makes_no_check_fall_over(facts: str):
    looked_at = 0
    for config in configs(TARGET if facts == "target" else DRAFT):
        try:
            check_forms(config, facts)
        except ExperimentError:
            continue
        looked_at += 1
        found(arguments(kv_cache_dtype="fp8"), **{facts: config})
    assert looked_at > 100


@pytest.mark.parametrize(("file", "content", "words"), [
    ("config.json", json.dumps(CONFIG | {"quantization_config": "fp8"}), "quantization_config = 'fp8'"), ("config.json", "[]", "holds no object"), ("config.json", "{", "cannot be read"),
    ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read")])
def test_files_that_cannot_be_read_are_the_users_to_put_right(write_experiment: Callable[..., Path], tmp_path: Path, file: str, content: str, words: str):
    path = write_experiment()
    for name in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / "target" / name).unlink(missing_ok=True)
    (tmp_path / "target" / file).write_text(content)
    with pytest.raises(ExperimentError) as refused:
        facts_of(load_experiment(path))
    assert words in refused.value.what and refused.value.where.startswith("target.model")
