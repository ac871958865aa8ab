"""The train stage on several workers as its job runs it, without vLLM: `python -m tests.backends.training_driver FOLDER`, inside a Ray job.

FOLDER holds `train.yaml`, unless that asks for a stream the store `captures` with one capture artifact, and afterwards `result.json`: the stage's metrics, or
the RaysdError that it ended with. The draft's files go to `FOLDER/draft`, the tables beside it.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.stage import Stored
from raysd.backends.ray_training import learn_on_workers
from raysd.backends.stream_capture import stream_engine
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.streaming import train_on_stream
from raysd.draft.train import train
from raysd.errors import RaysdError, to_dict
from raysd.experiment import load_experiment
from raysd.pipeline.events import EventProgress
from raysd.prompts.prompt_set import Prompt
from raysd.signals import raise_when_terminated, whole
from tests.stage_runs import attempt
from tests.tiny_engine import tiny_engine

CAPTURE = ArtifactKey("tiny", "capture", "0123456789abcdef0123456789abcdef")


def served(draft: Path, prompts: list[Prompt], k: int) -> AcceptanceCounts:
    return AcceptanceCounts(10, 20, 5, (4, 1))


def main(folder: Path) -> None:
    raise_when_terminated()
    experiment = load_experiment(folder / "train.yaml")
    with attempt(folder / "store", experiment, None, EventProgress(), whole) as run:
        try:
            if experiment.capture.mode == "stream":
                result = train_on_stream(run, served, partial(stream_engine, engine_factory=tiny_engine), learn_on_workers)
            else:
                captures = Store(FolderHome(folder / "captures"))
                # As with a store in S3, each node opens the captured states for itself.
                run = replace(run, inputs={"capture": captures.open(CAPTURE)}, elsewhere={"capture": Stored(captures.uri, CAPTURE)})
                result = train(run, served, learn_on_workers)
        except RaysdError as err:
            result = to_dict(err)
        else:
            for path in run.out.iterdir():
                shutil.move(path, folder)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
