"""The train stage on several workers as its job runs it, without an engine: `python -m tests.backends.training_driver FOLDER`, inside a Ray job.

FOLDER holds `train.yaml`, the store `captures` with one capture artifact, and afterwards `result.json`: the stage's metrics, or the RaysdError that it
ended with. The draft's files go to `FOLDER/draft`, the tables beside it.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.stage import Stored
from raysd.backends.ray_training import learn_on_workers
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.train import train
from raysd.errors import RaysdError, to_dict
from raysd.experiment import load_experiment
from raysd.pipeline.events import EventProgress
from raysd.signals import raise_when_terminated, whole
from tests.stage_runs import attempt

CAPTURE = ArtifactKey("tiny", "capture", "0123456789abcdef0123456789abcdef")


def main(folder: Path) -> None:
    raise_when_terminated()
    captures = Store(FolderHome(folder / "captures"))
    with attempt(folder / "store", load_experiment(folder / "train.yaml"), {"capture": captures.open(CAPTURE)}, EventProgress(), whole) as run:
        # As with a store in S3, each node opens the captured states for itself.
        run = replace(run, elsewhere={"capture": Stored(captures.uri, CAPTURE)})
        try:
            result = train(run, lambda draft, prompts, k: AcceptanceCounts(10, 20, 5, (4, 1)), learn_on_workers)
        except RaysdError as err:
            result = to_dict(err)
        for path in run.out.iterdir():
            shutil.move(path, folder)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
