"""What `raysd serve` takes from the store: the draft of an arm, looked at beside its target before anything is deployed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from raysd.artifacts import Store
from raysd.artifacts.cache import cache_folder
from raysd.artifacts.fingerprint import fingerprint
from raysd.artifacts.stage import Progress
from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.checks.draft_served import served_draft
from raysd.deployment.options import serve_section
from raysd.errors import ArtifactError, ExperimentError
from raysd.experiment import Experiment
from raysd.experiment.sweep import Arm
from raysd.pipeline.plan import PlannedStage
from raysd.pipeline.preflight import target_folder_on_disk
from raysd.sweep.bench import draft_folder
from raysd.sweep.engine import EngineSpec, engine_spec
from raysd.target.locate import resolve_target
from raysd.target.shape import TargetShape, read_shape


@dataclass(frozen=True)
class Served:
    """What goes to production."""

    arm: Arm
    spec: EngineSpec
    unchecked: list[str]
    """What could not be looked at on this machine, in words."""


def what_to_serve(experiment: Experiment, planned: Sequence[PlannedStage], store: Store, asked: Arm | None, fetch: bool, progress: Progress) -> Served:
    """The engine of the arm asked for, or of the one that the experiment serves. asked: of the command line; fetch: whether it
    is served by this machine, and a target of the hub brought here.

    Raises ExperimentError for an arm that the experiment has no draft for, and for a draft that does not fit the target; ArtifactError if its stage was not run.
    """
    section = serve_section(experiment)
    arm = experiment.served_arm(asked or section.arm)
    try:
        experiment.check_arm(arm)
    except ValueError as err:
        where, _, what = str(err).partition(": ")
        what, _, fix = what.partition("; ")
        raise ExperimentError(what=what, where=where, fix=fix) from err
    target = _target(experiment, fetch, progress)
    shape = read_shape(target) if (target / "config.json").is_file() else None
    draft = _draft(experiment, planned, store, arm, shape)
    unchecked = [] if shape is not None or draft is None else [f"whether the draft fits the target: {target} is not on this machine"]
    if draft is not None and store.home.remote and not fetch and draft != experiment.draft.checkpoint:
        unchecked.append(f"whether the nodes have {draft}, this machine's copy of what is in {store.uri}; put it there under the same path")
    settings = section.engine or experiment.sweep.engine
    return Served(arm, engine_spec(experiment, target, draft, section.k or experiment.sweep.k[0], settings), unchecked)


def _target(experiment: Experiment, fetch: bool, progress: Progress) -> Path:
    """Its folder; of one on the hub that is not to be fetched its id, which the replicas fetch by."""
    section = experiment.target
    local = section.model.startswith("pypi:") or target_folder_on_disk(section) is not None or section.model.startswith("/")
    return resolve_target(section, progress) if local or fetch else Path(section.model)


def _draft(experiment: Experiment, planned: Sequence[PlannedStage], store: Store, arm: Arm, target: TargetShape | None) -> Path | None:
    """The folder of its checkpoint, which fits the target."""
    finished = experiment.draft.checkpoint
    if arm == "bf16" and finished is not None:
        if target is None:
            return finished
        return _corrected(finished, target, experiment)
    inputs = {}
    for entry in planned:
        if entry.stage.name == {"bf16": "train", "fp8": "quantize"}.get(arm):
            if entry.state != "cached":
                raise ArtifactError(what=f"there is no draft of the arm {arm} yet ({entry.why})", where=store.place(entry.stage.key),
                                    fix="run `raysd run` on the experiment first, or serve another arm with --arm")
            inputs[entry.stage.name] = store.open(entry.stage.key)
    draft = draft_folder(experiment, inputs, arm)
    if draft is not None and target is not None:
        check_draft_fit(draft, target)
    return draft


def _corrected(finished: Path, target: TargetShape, experiment: Experiment) -> Path:
    """The draft's folder as vLLM is to be given it: its own, or a copy beside which something is put right, kept where a later deployment finds it."""
    made_of = {"draft": identify_draft(finished), "target": asdict(target), "layer_ids": experiment.draft.layer_ids}
    copy = cache_folder() / "drafts" / fingerprint(made_of)
    if copy.is_dir():
        return copy
    with tempfile.TemporaryDirectory(prefix="raysd-") as scratch:
        made = served_draft(finished, target, experiment.draft.layer_ids, Path(scratch) / "draft")
        if made == finished:
            return finished
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=copy.parent) as beside:
            whole = shutil.copytree(made, Path(beside) / "draft", symlinks=True)
            if not copy.is_dir():
                whole.rename(copy)
    return copy
