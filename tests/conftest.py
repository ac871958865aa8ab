"""A small experiment whose parts are real files, for tests that plan, submit or refuse one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from raysd.signals import TERMINATING

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


WEIGHTS = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,), "model.layers.3.input_layernorm.weight": (64,),
           "model.layers.3.post_attention_layernorm.weight": (64,), "model.layers.3.self_attn.q_proj.weight": (128, 64), "model.layers.3.self_attn.k_proj.weight": (64, 64),
           "model.layers.3.self_attn.v_proj.weight": (64, 64), "model.layers.3.self_attn.o_proj.weight": (64, 128)}
"""Of a target of CONFIG: what a draft shares with it, and its last layer's attention."""


CHAIN = ("tests/e2e/", "tests/faults/")
"""Whose tests share `first_run`: they are one process's, however many share the rest, so that the chain is run once."""
LONG = ("tests/backends/", "tests/sweep/", "tests/checks/", "tests/draft/")
"""Where engines and Rays are started: soon, so that what is left at the end is short, and the processes end at nearly one time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(CHAIN), not item.nodeid.startswith(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: a file's tests are one process's, and so are all of the chain's. (xdist 3.8's own marks for that, `loadgroup`, do nothing in pytest 9.)"""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ChainTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "chain" if nodeid.startswith(CHAIN) else super()._split_scope(nodeid)

    return ChainTogether(config, log)


@pytest.fixture
def signals() -> Iterator[None]:
    """Signals as a process of its own has them, during a test."""
    before = {number: signal.getsignal(number) for number in (*TERMINATING, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it, and what nohup starts SIGHUP
    for number in TERMINATING:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from tests.tiny_models import tiny_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def experiment_document(tmp_path: Path, tokenizer_files: dict[str, bytes]) -> dict[str, Any]:
    """An experiment as its YAML holds it, beside the prompts and a target's folder, of whose layers most are absent: it can be planned, and no more."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: np.zeros(shape, np.float16) for name, shape in WEIGHTS.items()}, target / "model.safetensors")
    for name, content in tokenizer_files.items():
        (target / name).write_bytes(content)
    rows = [
        {"id": f"{topic}-{form}", "topic": topic, "split": split, "prompt": f"Tell me about {topic}, {form}."}
        for split, topics in (("train", ("rain", "bread")), ("choose", ("chess",)), ("report", ("ferries", "kites", "glass", "soup")))
        for topic in topics
        for form in ("short", "long")
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "tiny",
        "store": "runs",
        "target": {"model": "./target", "max_model_len": 512},
        "prompts": {"path": "prompts.jsonl"},
        "capture": {},
        "train": {},
        "quantize": {},
    }


@pytest.fixture
def write_experiment(tmp_path: Path, experiment_document: dict[str, Any]) -> Callable[..., Path]:
    """Writes the experiment, with some top-level keys replaced (None: removed), and returns its path."""

    def write(**changes: Any) -> Path:
        document = {key: value for key, value in {**experiment_document, **changes}.items() if value is not None}
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The tiny chain, run once for all tests that only read it: its experiment, and what `raysd run --json` printed."""
    from tests.tiny_chain import raysd, write_experiment

    path = write_experiment(tmp_path_factory.mktemp("chain"))
    done = raysd("run", str(path), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    return path, json.loads(done.stdout)
