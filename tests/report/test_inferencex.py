"""Cells in InferenceX's form, against its keys and against what the cells were made with."""

import json
import re
from dataclasses import replace

import pytest

from raysd.errors import ArtifactError, MeasurementError
from raysd.report.inferencex import ALL_TOGETHER, write_inferencex
from raysd.report.sides import read_side


def test_every_valid_cell_has_its_raw_and_its_agg_form(demo, tmp_path):
    demo.hardware, demo.invalid = "mi355x", {("fp8", 4, 2): ["too few requests in flight"]}
    written = write_inferencex(read_side("demo", demo.sweep()), tmp_path / "out")
    assert len(written) == 2 * 29 + 1 and sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "out").iterdir())
    raw, agg = (json.loads((tmp_path / "out" / f"{prefix}smollm2-cpu_report_bf16_k3_conc4_block1.json").read_text()) for prefix in ("", "agg_"))
    rate = 180 * 1.05 * 0.98
    assert raw | {"date": 0, "input_lens": 0, "output_lens": 0} == raw | {
        "date": 0, "input_lens": 0, "output_lens": 0, "backend": "vllm", "num_prompts": 16, "completed": 16, "max_concurrency": 4, "request_rate": "inf",
        "output_throughput": pytest.approx(rate), "total_token_throughput": pytest.approx(1.4 * rate), "total_output_tokens": 1600, "total_input_tokens": 640,
        "mean_ttft_ms": pytest.approx(60), "p99_ttft_ms": pytest.approx(54 + 0.99 * 12), "median_tpot_ms": pytest.approx(4000 / rate)}
    assert raw["benchmark_start_time_unix"] == 1.78e9 and raw["date"] == "20260528-202640"
    assert raw["benchmark_end_time_unix"] == pytest.approx(1.78e9 + raw["duration"])
    assert raw["spec_decode_acceptance_length"] == pytest.approx(1.8) and raw["spec_decode_num_drafts"] == 800
    assert agg == agg | {"hw": "mi355x", "conc": 4, "framework": "vllm", "spec_decoding": "draft_model", "disagg": False, "is_multinode": False, "osl": 128, "tp": 1,
                         "tput_per_gpu": pytest.approx(1.4 * rate), "output_tput_per_gpu": pytest.approx(rate), "mean_ttft": pytest.approx(0.060),
                         "median_tpot": pytest.approx(4 / rate), "median_intvty": pytest.approx(rate / 4)}
    for unknown in ("image", "precision", "isl", "ep", "infmax_model_prefix", "mean_itl"):
        assert unknown not in agg
    together = json.loads((tmp_path / "out" / ALL_TOGETHER).read_text())
    assert len(together) == 29 and agg in together and {each["spec_decoding"] for each in together if each["conc"] == 2} == {"none", "draft_model"}


def test_names_of_files_are_as_many_as_cells_whatever_workloads_are_called(demo, tmp_path):
    names = ("1k/1k", "1k-1k", "1k 1k", "1k_1k", "1k.1k", "1k:1k", "x", "agg_x", "x_none")
    one = demo.cells()
    demo.cells = lambda: [cell | {"workload": name} for name in names for cell in one]
    side = read_side("demo", demo.sweep())
    side = replace(side, experiment=side.experiment.model_copy(update={"name": "agg"}))
    written = write_inferencex(side, tmp_path / "out")
    assert len({path.name.lower() for path in written}) == len(written) == 2 * len(names) * len(one) + 1 == len(list((tmp_path / "out").iterdir()))
    assert (tmp_path / "out" / "agg_1k%2F1k_none_conc1_block1.json").is_file()


def test_names_of_files_fit_whatever_workloads_and_the_experiment_are_called(demo, tmp_path):
    longest = ("a" + 62 * "/" + "b", "a" + 62 * "/" + "c", "a" + 61 * "/" + "-b", 64 * "a", 46 * "/" + "ab", 46 * "/" + "abc")
    demo.ks = [8]
    one = [cell | {"block": 99_999 - cell["block"], "concurrency": 1_000 * cell["concurrency"]} for cell in demo.cells()]
    demo.cells = lambda: [cell | {"workload": name} for name in longest for cell in one]
    side = read_side("demo", demo.sweep())
    side = replace(side, experiment=side.experiment.model_copy(update={"name": 64 * "e"}))
    written = write_inferencex(side, tmp_path / "out")
    assert len({path.name.lower() for path in written}) == len(written) == 2 * len(longest) * len(one) + 1 == len(list((tmp_path / "out").iterdir()))
    assert max(len(path.name.encode()) for path in written) <= 255
    assert (tmp_path / "out" / f"{64 * 'e'}_{64 * 'a'}_none_conc1000_block100000.json").is_file()  # what fits is not cut
    assert all(re.fullmatch(r"[\w.~-]*(%[0-9A-F]{2}[\w.~-]*)*", path.name) for path in written)


@pytest.mark.parametrize(("name", "reason"), [("file", "File exists"), ("file/below", "Not a directory"), (256 * "f", "File name too long")])
def test_a_folder_that_cannot_be_written_says_why(demo, tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=f"cannot be written: {reason}") as raised:
        write_inferencex(read_side("demo", demo.sweep()), tmp_path / name)
    assert raised.value.where == str(tmp_path / name)


def test_rates_of_a_gpu_are_of_the_gpus_of_an_engine(demo, tmp_path):
    demo.hardware, demo.tensor_parallel = "mi355x", 4
    write_inferencex(read_side("demo", demo.sweep()), tmp_path)
    agg = json.loads((tmp_path / "agg_smollm2-cpu_report_none_conc1_block1.json").read_text())
    assert agg["tp"] == 4 and agg["output_tput_per_gpu"] == pytest.approx(20.0) and agg["spec_decoding"] == "none"


def test_a_sweep_without_a_valid_cell_gives_none(demo, tmp_path):
    demo.ratios = {}
    demo.invalid = {("none", concurrency, block): ["no"] for concurrency in (1, 2, 4, 8) for block in range(3)}
    with pytest.raises(MeasurementError, match="no valid cell"):
        write_inferencex(read_side("demo", demo.sweep()), tmp_path)
