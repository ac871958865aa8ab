"""Which block size of a KV cache two attention backends share: by the table, and by vLLM's own classes."""

import pytest
from packaging.version import Version

from raysd.checks.attention import CPU_LATENT, ROCM_GROUPED, backends_of, kind_of
from raysd.checks.kv_blocks import MultipleOf, NotTold, TabledSizes, manager_block, shared_block, suiting, takes


def table(version: str) -> TabledSizes:
    return TabledSizes(Version(version))


@pytest.mark.parametrize(("config", "kind"), [
    ({"model_type": "llama"}, "grouped"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "grouped"),
    ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "kv_lora_rank": 512}}, "latent"),
    ({"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048}, "latent_sparse"),
    ({"model_type": "minimax_m3"}, "block_sparse"),
    ({"model_type": "minimax_m2"}, "grouped"),
])
def test_the_kind_of_attention_is_read_from_the_config(config: dict, kind: str):
    assert kind_of(config) == kind


@pytest.mark.parametrize(("kind", "platform", "named", "environment", "backends"), [
    ("latent", "rocm", None, {}, ("TRITON_MLA",)),  # AITER is off by default
    ("latent", "rocm", None, {"VLLM_ROCM_USE_AITER": "1"}, ("ROCM_AITER_MLA",)),
    ("latent", "rocm", None, {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MLA": "0"}, ("TRITON_MLA",)),
    ("latent", "rocm", None, {"VLLM_ROCM_USE_AITER_MLA": "1"}, ("TRITON_MLA",)),
    ("latent", "rocm", "TRITON_MLA", {"VLLM_ROCM_USE_AITER": "1"}, ("TRITON_MLA",)),
    ("grouped", "rocm", None, {"VLLM_ROCM_USE_AITER": "1"}, ("ROCM_ATTN",)),
    ("grouped", "rocm", "ROCM_AITER_FA", {}, ("ROCM_AITER_FA",)),
    ("block_sparse", "rocm", "TRITON_ATTN", {}, ("TRITON_ATTN", "MINIMAX_M3_SPARSE")),
    ("latent", "cpu", None, {"VLLM_ROCM_USE_AITER": "1"}, ("CPU_MLA",)),
    ("latent", "cpu", "TRITON_MLA", {}, ("CPU_MLA",)),  # a name of another platform is passed over
    ("grouped", "cpu", "TRITON_ATTN", {}, ("CPU_ATTN",)),
])
def test_a_model_gets_the_backend_that_is_named_or_the_platforms(kind, platform, named, environment, backends):
    assert backends_of(kind, platform, named, environment) == backends


def test_on_a_cpu_with_amx_latent_attention_gets_another_backend_unless_named():
    assert backends_of("latent", "cpu", None, {}, cpu_latent="AMX_MLA") == ("AMX_MLA",)
    assert backends_of("latent", "cpu", "CPU_MLA", {}, cpu_latent="AMX_MLA") == ("CPU_MLA",)
    assert shared_block("cpu", ["AMX_MLA", "CPU_ATTN"], None, table("0.32.0")).size == 128


@pytest.mark.parametrize(("version", "backends", "asked", "size"), [
    ("0.19.1", ["ROCM_AITER_MLA", "ROCM_ATTN"], None, None),
    ("0.19.1", ["TRITON_MLA", "ROCM_ATTN"], None, 16),
    ("0.20.0", ["ROCM_AITER_MLA", "ROCM_ATTN"], None, 16),
    ("0.21.0rc1", ["ROCM_AITER_MLA", "ROCM_ATTN"], 64, 64),
    ("0.24.0", ["ROCM_AITER_MLA", "ROCM_ATTN"], 1, None),
    ("0.24.0", ["ROCM_AITER_MLA", "ROCM_AITER_MLA"], 1, 1),
    ("0.24.0", ["ROCM_AITER_FA", "ROCM_ATTN"], 64, 32),
    ("0.33.0", ["TRITON_ATTN", "MINIMAX_M3_SPARSE", "ROCM_AITER_FA"], 128, None),
    ("0.33.0", ["TRITON_ATTN", "MINIMAX_M3_SPARSE", "ROCM_AITER_FA"], None, None),
    ("0.33.0", ["TRITON_ATTN", "MINIMAX_M3_SPARSE", "TRITON_ATTN"], None, 128),
])
def test_the_table_says_what_releases_share_on_rocm(version: str, backends: list[str], asked: int | None, size: int | None):
    found = shared_block("rocm", backends, asked, table(version))
    assert found.size == size
    assert found.words.startswith("No common block size for ") == (size is None)


def test_the_table_does_not_guess():
    with pytest.raises(NotTold, match="before 0.20.0"):
        table("0.19.1").kernel_block_sizes("ROCM_AITER_FA")
    with pytest.raises(NotTold, match="SOMETHING_ATTN"):
        table("0.33.0").kernel_block_sizes("SOMETHING_ATTN")
    assert suiting("rocm", ["ROCM_AITER_MLA"], ["ROCM_AITER_FA", "TRITON_ATTN"], 16, table("0.19.1")) == []


def test_what_suits_the_target_is_named():
    assert suiting("rocm", ["TRITON_ATTN", "MINIMAX_M3_SPARSE"], ROCM_GROUPED, 128, table("0.33.0")) == ["ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN", "ROCM_ATTN"]


def test_the_cpu_build_sets_the_block_size_of_latent_attention_itself():
    assert manager_block("cpu", ["CPU_MLA", "CPU_ATTN"], 64, table("0.32.0")) == 16
    assert manager_block("cpu", ["CPU_ATTN"], None, table("0.32.0")) == 128
    assert manager_block("cpu", ["CPU_ATTN"], 64, table("0.32.0")) == 64


def test_a_size_that_others_divide_is_taken_by_multiples_alone():
    assert takes((MultipleOf(16),), 48) and not takes((16, 32), 48)


@pytest.fixture(scope="module")
def vllm():
    pytest.importorskip("vllm")
    from raysd.backends.vllm_probe import InstalledVllm

    return InstalledVllm()


def test_the_installed_vllm_says_what_the_table_says_of_its_release(vllm):
    tabled = TabledSizes(Version(vllm.version))
    for backend in ("ROCM_AITER_MLA", "TRITON_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE", *ROCM_GROUPED, "CPU_ATTN", *CPU_LATENT):
        assert vllm.kernel_block_sizes(backend) == tabled.kernel_block_sizes(backend), backend


def test_the_installed_vllm_decides_as_the_table_does(vllm):
    tabled = TabledSizes(Version(vllm.version))
    names = ("ROCM_AITER_MLA", "TRITON_MLA", *ROCM_GROUPED, "CPU_ATTN", "CPU_MLA")
    for target in names:
        for draft in names:
            for block in (1, 16, 32, 64, 128):
                backends = list(dict.fromkeys((target, draft)))
                assert vllm.shared_block(block, backends).size == tabled.shared_block(block, backends).size, (target, draft, block)


def test_the_installed_vllm_refuses_latent_beside_grouped_attention_on_cpus_in_the_words_of_the_engine(vllm):
    found = shared_block("cpu", ["CPU_MLA", "CPU_ATTN"], None, vllm)
    assert found.size is None and "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])" in found.words
    assert shared_block("cpu", ["CPU_MLA", "CPU_MLA"], None, vllm).size == 16


def test_the_installed_vllm_does_not_guess_of_a_backend_that_it_lacks(vllm):
    with pytest.raises(NotTold, match="NO_SUCH_ATTN"):
        vllm.kernel_block_sizes("NO_SUCH_ATTN")
    with pytest.raises(NotTold, match="FLASHINFER"):
        vllm.shared_block(16, ["FLASHINFER"])


def test_the_installed_vllm_lists_its_speculative_fields_and_environment(vllm):
    assert {"num_speculative_tokens", "draft_tensor_parallel_size", "attention_backend", "kv_cache_dtype"} <= vllm.speculative_fields
    assert {"VLLM_ROCM_USE_AITER", "VLLM_ENGINE_READY_TIMEOUT_S"} <= vllm.environment_names
    assert vllm.cpu_latent_backend() in CPU_LATENT


def test_the_installed_vllm_is_asked_without_a_trace_on_stdout_or_in_the_environment():
    import subprocess
    import sys

    pytest.importorskip("vllm")
    code = """import os
from raysd.backends.vllm_probe import InstalledVllm
before = dict(os.environ)
InstalledVllm().shared_block(16, ["CPU_MLA", "CPU_ATTN"])
print(sorted(name for name in {*before, *os.environ} if name.startswith("VLLM_LOGGING") and before.get(name) != os.environ.get(name)))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_installed_vllm_knows_its_version_before_it_is_imported():
    import subprocess
    import sys

    code = "import sys; from raysd.backends.vllm_probe import installed_version; print(installed_version(), 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, imported = done.stdout.split()
    assert imported == "False" and Version(version)
