"""Data sets as the hub's own cache lays them out; the hub itself is never asked."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.experiment.loader import dump_experiment
from raysd.experiment.prompts import PromptsSection
from raysd.prompts.hub import HubName, parse_hub_name
from raysd.prompts.prompt_set import load_prompts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of the hub's cache, which is all that there is: the hub cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(cache: Path, name: str = "org/name", ref: str = "main") -> Path:
    """A data set's folder in the cache, with a ref that points to it."""
    folder = cache / f"datasets--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True, exist_ok=True)
    return folder / "snapshots" / COMMIT


def table(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list(texts)}), path)


def said(name: str) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in load_prompts(PromptsSection(path=name)).prompts]


def refused(name: str) -> ExperimentError:
    with pytest.raises(ExperimentError) as caught:
        said(name)
    assert caught.value.exit_code == 64 and name in caught.value.where
    return caught.value


def test_a_name_has_up_to_three_parts():
    assert parse_hub_name("hf:org/name", "") == HubName("org/name", None, None)
    assert parse_hub_name("hf:nvidia/SPEED-Bench:qualitative/test@refs/convert/parquet", "") == HubName("nvidia/SPEED-Bench", "qualitative/test", "refs/convert/parquet")
    for wrong in ("hf:name", "hf:org/name:", "hf:org/name@", "hf:org/name:a/b/c", "hf:org/na me"):
        with pytest.raises(ExperimentError, match="no name of a data set"):
            parse_hub_name(wrong, "prompts.path")


def test_a_data_set_is_read_from_the_cache_split_by_split(cache):
    folder = snapshot(cache)
    table(folder / "data" / "train-00000-of-00002.parquet", "a", "b")
    table(folder / "data" / "train-00001-of-00002.parquet", "c")
    table(folder / "data" / "test-00000-of-00001.parquet", "d")
    (folder / "dataset_infos.json").write_text(json.dumps({"features": {}}))
    assert said("hf:org/name:train") == ["a", "b", "c"]
    assert said("hf:org/name:test") == ["d"]
    assert sorted(said("hf:org/name")) == ["a", "b", "c", "d"]
    assert "use one of: test, train" in refused("hf:org/name:validation").fix


def test_configurations_are_told_apart_by_their_folders(cache):
    folder = snapshot(cache, "nvidia/SPEED-Bench")
    table(folder / "qualitative" / "test-00000-of-00001.parquet", "short")
    table(folder / "throughput_1k" / "test-00000-of-00001.parquet", "long")
    assert said("hf:nvidia/SPEED-Bench:qualitative/test") == ["short"]
    assert sorted(said("hf:nvidia/SPEED-Bench:test")) == ["long", "short"]
    assert "qualitative/test, throughput_1k/test" in refused("hf:nvidia/SPEED-Bench:qualitative/train").fix


def test_the_card_says_which_files_a_split_is_made_of(cache):
    folder = snapshot(cache)
    for name in ("one", "two", "rest"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: one.jsonl\n"
                                      "- config_name: large\n  data_files:\n  - split: train\n    path: [one.jsonl, 'tw*.jsonl']\n---\nA data set.\n")
    assert said("hf:org/name:small/train") == ["one"]
    assert said("hf:org/name:large/train") == ["one", "two"]
    assert "large/train, small/train" in refused("hf:org/name:rest").fix


def test_a_revision_is_a_branch_or_a_commit(cache):
    table(snapshot(cache, ref="v2") / "train.parquet", "a")
    assert said("hf:org/name@v2") == said(f"hf:org/name:train@{COMMIT}") == ["a"]
    assert "cannot be fetched" in refused("hf:org/name").what, "nobody said that v2 is the main branch"


def test_without_a_network_and_without_a_copy_the_error_says_what_to_do(cache):
    error = refused("hf:org/absent:train")
    assert "org/absent cannot be fetched, and the cache does not hold it" in error.what and "HF_HOME" in error.fix


def test_a_data_set_of_pictures_is_refused(cache):
    (snapshot(cache) / "cat.png").write_bytes(b"")
    assert "holds no .parquet" in refused("hf:org/name").what


def test_a_name_of_the_hub_is_no_path_in_an_experiment(write_experiment):
    experiment = load_experiment(path := write_experiment(prompts={"path": "hf:org/name:train@v2"}))
    assert str(experiment.prompts.path) == "hf:org/name:train@v2"
    path.write_text(dump_experiment(experiment))
    assert load_experiment(path) == experiment
