"""Two people start the same experiment at the same moment, each with a Ray of their own: one works, the other follows, both get the same result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from raysd.artifacts import ArtifactKey, FolderHome, Store

RUN_S = 300
WEIGHTS = "draft/model.safetensors"


def test_two_runs_at_once_make_each_stage_once_and_end_alike(first_run, tmp_path):
    spec, run = first_run
    shutil.copytree(spec.parent / "runs", tmp_path / "runs")
    for stage in ("train", "report"):
        shutil.rmtree(tmp_path / "runs" / "tiny" / stage)
    runners = [subprocess.Popen([sys.executable, "-m", "raysd", "run", str(spec), "--store", str(tmp_path / "runs"), "--json"], text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=(tmp_path / f"shown-{number}").open("w"))
               for number in range(2)]
    try:
        told = [runner.communicate(timeout=RUN_S)[0] for runner in runners]
    finally:
        for runner in runners:
            if runner.poll() is None:
                runner.terminate()
                runner.wait(60)
    shown = [(tmp_path / f"shown-{number}").read_text() for number in range(2)]
    assert [runner.returncode for runner in runners] == [0, 0], shown
    first, second = ([(stage["stage"], stage["fingerprint"], stage["artifact"]) for stage in json.loads(text)["stages"]] for text in told)
    assert first == second and any("following" in text for text in shown), shown
    store, before = Store(FolderHome(tmp_path / "runs")), Store(FolderHome(spec.parent / "runs"))
    for stage, fingerprint, _ in first:
        key = ArtifactKey("tiny", stage, fingerprint)
        store.open(key)
        assert [store.lease(key).lease.number, store.lease(key).state()] == [1, "released"], stage
        if stage == "train":
            assert store.record(key).files[WEIGHTS] == before.record(key).files[WEIGHTS]
