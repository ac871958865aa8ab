from pathlib import Path

import pytest

from raysd.errors import ExperimentError
from raysd.experiment.engine import EngineSettings
from raysd.sweep.engine import EngineSpec
from raysd.sweep.residency import ENGINE_BYTES, MEMORY_FRAC, decide_residency


def specs(folder: Path, hardware="cpu", **settings) -> list[EngineSpec]:
    """A target of 1000 bytes, alone and with a draft of 200."""
    for name, size in (("target", 1000), ("draft", 200)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_bytes(bytes(size))
    return [EngineSpec(folder / "target", draft, 3 if draft else None, "bfloat16", 1, 256, None, False, hardware, EngineSettings(**settings))
            for draft in (None, folder / "draft")]


def test_on_a_cpu_memory_decides(tmp_path):
    both = specs(tmp_path, kv_cache_bytes=2**26)
    need_bytes = 2 * (ENGINE_BYTES + 2**26 + 1000) + 200
    assert decide_residency("auto", both, int(need_bytes / MEMORY_FRAC) + 2).together
    short = decide_residency("auto", both, int(need_bytes / MEMORY_FRAC) - 2)
    assert not short.together and "2 engines take about" in short.why
    assert not decide_residency("alone", both, 10**15).together
    with pytest.raises(ExperimentError, match="do not fit beside each other"):
        decide_residency("together", both, int(need_bytes / MEMORY_FRAC) - 2)


def test_on_gpus_the_shares_of_the_same_devices_decide(tmp_path):
    assert decide_residency("auto", specs(tmp_path, "mi355x", gpu_memory_frac=0.45), 0).together
    assert not decide_residency("auto", specs(tmp_path, "mi355x", gpu_memory_frac=0.9), 0).together
    with pytest.raises(ExperimentError) as refused:
        decide_residency("together", specs(tmp_path, "mi355x", gpu_memory_frac=0.9), 0)
    assert "sweep.residency" in refused.value.where and "0.47" in refused.value.fix
