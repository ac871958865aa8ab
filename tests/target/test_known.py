"""What is published of some targets."""

import json

from raysd.target.known import known_target, published
from raysd.target.shape import read_shape


def test_a_published_target_is_found_by_its_id_however_it_is_written():
    assert known_target("amd/Kimi-K2.5-MXFP4") == known_target("AMD/kimi-k2.5-mxfp4")
    assert known_target("amd/Kimi-K2.5-MXFP4").weight_bytes == 557_000_000_000
    assert known_target("somebody/else") is None


def test_what_is_published_is_a_config_that_the_rest_of_raysd_reads(tmp_path):
    for architecture in published().values():
        for name in architecture["checkpoints"]:
            config = known_target(name).config | {"rms_norm_eps": 1e-6, "rope_theta": 5e4}
            (tmp_path / "config.json").write_text(json.dumps(config))
            shape = read_shape(tmp_path)
            assert (shape.layers, shape.hidden_size, shape.vocab_size) == (architecture["layers"], architecture["hidden"], architecture["vocab"])
            assert (shape.latent is not None) == (architecture["attention"]["kind"] == "mla")
