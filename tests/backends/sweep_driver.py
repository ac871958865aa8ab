"""The sweep stage as its job runs it, on engines that compute nothing: `python -m tests.backends.sweep_driver FOLDER`, inside a Ray job.

FOLDER holds `sweep.yaml`, and afterwards `result.json`: the stage's metrics and how long it took, or the RaysdError that it ended with. Its files go to
`FOLDER/out`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.stage import Stored
from raysd.backends.sweep_nodes import open_nodes
from raysd.errors import RaysdError, to_dict
from raysd.experiment import load_experiment
from raysd.pipeline.events import EventProgress
from raysd.signals import raise_when_terminated, whole
from raysd.sweep.sweep import sweep
from tests.mock_engines import launch
from tests.stage_runs import attempt

TRAIN = ArtifactKey("tiny", "train", "0123456789abcdef0123456789abcdef")


def main(folder: Path) -> None:
    raise_when_terminated()
    experiment, drafts = load_experiment(folder / "sweep.yaml"), Store(FolderHome(folder / "drafts"))
    started = time.monotonic()
    with attempt(folder / "store", experiment, {"train": drafts.open(TRAIN)}, EventProgress(), whole, elsewhere={"train": Stored(drafts.uri, TRAIN)}) as run:
        try:
            result = sweep(run, partial(open_nodes, launch=launch)) | {"elapsed_s": time.monotonic() - started}
        except RaysdError as err:
            result = to_dict(err)
        else:
            shutil.copytree(run.out, folder / "out")
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
