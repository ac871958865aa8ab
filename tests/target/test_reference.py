from __future__ import annotations

import json

import pytest

from raysd.target.reference import why_no_reference
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


def test_a_target_that_fits_the_node_is_compared_and_one_that_does_not_is_not(target):
    size_bytes = (target / "model.safetensors").stat().st_size
    assert why_no_reference(target) is None and why_no_reference(target, memory_bytes=4 * size_bytes) is None
    assert "memory" in why_no_reference(target, memory_bytes=4 * size_bytes - 1)


@pytest.mark.parametrize(("changes", "reason"), [({"model_type": "novel_moe", "auto_map": {"AutoModelForCausalLM": "modeling_novel.Novel"}}, "no language model of type novel_moe"),
                                                 ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantized .compressed-tensors.")])
def test_a_target_that_hugging_face_cannot_compute_alone_is_not_compared(target, tmp_path, changes, reason):
    import re

    (tmp_path / "config.json").write_text(json.dumps(json.loads((target / "config.json").read_text()) | changes))
    assert re.search(reason, why_no_reference(tmp_path))
