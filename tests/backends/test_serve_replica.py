"""What a replica makes of what it is told, without Ray."""

import pytest

from raysd.backends.serve_replica import parsed


def test_flags_become_arguments_as_vllm_s_own_command_line_reads_them():
    read = parsed(["--attention-backend=TRITON_ATTN", "--kv-cache-dtype=fp8", "--no-async-scheduling", "--compilation-config.cudagraph_mode=NONE", "--tool-call-parser=hermes",
                   "--enable-auto-tool-choice"])
    assert read["compilation_config"].cudagraph_mode.name == "NONE"
    assert {name: read[name] for name in ("attention_backend", "kv_cache_dtype", "async_scheduling", "tool_call_parser", "enable_auto_tool_choice")} == {
        "attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8", "async_scheduling": False, "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    assert len(read) == 6


def test_no_flag_is_no_argument():
    assert parsed([]) == {}


@pytest.mark.parametrize("flag", ["--no-such-argument=1", "--max-num-batched-tokens=many"])
def test_what_vllm_does_not_take_is_refused(flag):
    with pytest.raises(ValueError, match="extra_args"):
        parsed([flag])
