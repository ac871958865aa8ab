"""What is checked before anything is submitted: all that the configuration and the disk can tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts import Store, difference
from raysd.artifacts.lease import Clock, utc_now
from raysd.artifacts.resolved import Resolved
from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.draft.shape import check_servable, check_special_tokens, check_trainable, draft_shape
from raysd.errors import DamagedError, ExperimentError, RaysdError, TargetError
from raysd.experiment import Experiment
from raysd.experiment.target import TargetSection
from raysd.hardware.catalogue import find_machine
from raysd.hidden_states.queue import check_queue, most_bytes
from raysd.pipeline.disk import check_disk, disk_need_bytes, expected_bytes
from raysd.pipeline.plan import PlannedStage
from raysd.pipeline.stages import Stage, build_stages
from raysd.prompts.prompt_set import PromptSet, load_prompts, load_prompts_of
from raysd.sweep.workloads import prompts_of, ready_prompts, too_few
from raysd.target.locate import identify_target
from raysd.target.pypi_asset import cached_asset, parse_asset
from raysd.target.shape import TargetShape, check_plain_logits, read_shape


@dataclass(frozen=True)
class Chain:
    """An experiment's stages, with what their fingerprints were computed from."""

    experiment: Experiment
    """A target of the Hugging Face hub is pinned in it to the commit that the fingerprints are of: a branch may move."""
    prompts: PromptSet
    in_place: dict[str, Any]
    """What the stages read where it lies, as it was found: `target`, and `checkpoint` if the draft is a finished one."""
    stages: list[Stage]

    def check_unchanged(self) -> None:
        """Raises ExperimentError, naming what changed, if the stages no longer find where it lies what their fingerprints say."""
        try:
            changed = difference(self.in_place, _in_place(self.experiment))
        except ExperimentError as err:
            raise _changed(err.what, err.where) from err
        if changed:
            raise _changed(changed[0], "target.model" if changed[0].startswith("target") else "draft.checkpoint")


def chain_of(experiment: Experiment) -> Chain:
    """The experiment's stages, with the target, the prompts and a finished draft looked at, each once.

    Raises ExperimentError if the prompts, the target's folder or the finished draft are absent or unfit; TargetError if a
    Hugging Face id cannot be resolved.
    """
    found, prompts = _in_place(experiment), load_prompts_of(experiment)
    if "commit" in found["target"]:
        experiment = experiment.model_copy(update={"target": experiment.target.model_copy(update={"revision": found["target"]["commit"]})})
    return Chain(experiment, prompts, found, build_stages(experiment, found["target"], prompts, found.get("checkpoint")))


def stages_of(experiment: Experiment) -> list[Stage]:
    """The stages of `chain_of`, for whoever runs none of them."""
    return chain_of(experiment).stages


def _changed(what: str, where: str) -> ExperimentError:
    return ExperimentError(what=f"{what}, since the stage began: its result is thrown away", where=where,
                           fix="bring back what was there to go on, or run again with what is there now; leave it as it is while a stage runs")


def _in_place(experiment: Experiment) -> dict[str, Any]:
    checkpoint = experiment.draft.checkpoint
    return {"target": identify_target(experiment.target)} | ({} if checkpoint is None else {"checkpoint": identify_draft(checkpoint)})


def check_experiment(experiment: Experiment) -> None:
    """Raises ExperimentError for prompts and lengths that are too few or too long, for hardware that is not known or asks too much of a node, and, if the target is
    on this machine already, for one whose weights a draft cannot share, and for a draft that does not fit it, finished or yet to be trained, or that vLLM would
    not serve beside it. TargetError for weights of the target that are damaged.

    Imports no torch: `raysd plan` is to answer at once.
    """
    _check_prompts_and_lengths(experiment)
    machine = find_machine(experiment.hardware.name)
    for stage, resources in experiment.hardware.resources.items():
        if machine.gpus_per_node is not None and resources.gpus > machine.gpus_per_node:
            raise ExperimentError(
                what=f"{resources.gpus:g} GPUs for one job, a {machine.name} node has {machine.gpus_per_node}",
                where=f"hardware.resources.{stage}.gpus",
                fix="ask for what one node has, or name the hardware in hardware.name",
            )
    folder = target_folder_on_disk(experiment.target)
    if folder is None:
        return
    shape = read_shape(folder)
    _check_target_fits(experiment.target, shape)
    if experiment.capture is not None:
        check_plain_logits(folder)
    if experiment.draft.checkpoint is not None:
        check_draft_fit(experiment.draft.checkpoint, shape, experiment.draft.layer_ids, quantizes=experiment.quantize is not None)
    elif experiment.train is None:
        shape.aux_layers(experiment.draft.aux_layers)
    else:
        draft = check_trainable(experiment.draft, folder)
        devices = experiment.sweep.engine.draft_args.get("draft_tensor_parallel_size", experiment.target.tensor_parallel)
        check_servable(draft, shape, int(devices), experiment.hardware.name)


def check_same_target(stages: Sequence[Stage], store: Store) -> Resolved | None:
    """What the experiment's name stands for in the store; None if for nothing yet.

    Raises ExperimentError if it stands for another target: two models must not share one name. DamagedError if that cannot be told.
    """
    known, name = store.resolved(stages[0].experiment), stages[0].experiment
    for target in [known.target] if known is not None else _targets_of_records(stages, store):
        changed = difference(_model_of(target), _model_of(_target_of(stages)), "target")
        if changed:
            raise ExperimentError(
                what=f"the name {name} stands for another target in this store: {changed[0]}",
                where=f"name: {name} (store {store.uri})",
                fix="take a new name for the new target",
            )
    return known


def _targets_of_records(stages: Sequence[Stage], store: Store) -> list[dict[str, Any]]:
    """The targets of the newest artifacts under a name of which nothing else says what it stands for: a copy of a part of a store, say."""
    targets = []
    for stage in (stage for stage in stages if "target" in stage.identity):
        try:
            record = store.newest_record(stage.experiment, stage.name)
        except DamagedError:  # it can tell nothing, and whoever needs it is told by the plan
            continue
        targets += [] if record is None else [record.identity["target"]]
    return targets


def resolve(stages: Sequence[Stage], store: Store, clock: Clock = utc_now) -> bool:
    """Makes the experiment's name stand for these stages: for `raysd gc`, and so that no other target takes the name. Returns whether it did not before.

    To be called before anything of them runs. Raises as `check_same_target` does.
    """
    now = Resolved(experiment=stages[0].experiment, target=_target_of(stages), stages={stage.name: stage.fingerprint for stage in stages},
                   resolved=clock().isoformat(timespec="seconds"))
    known = check_same_target(stages, store)
    if known is None and store.first_resolved(now):
        return True
    known = known or check_same_target(stages, store)  # somebody else was first
    changed = known is None or known.stages != now.stages
    if changed:
        store.now_resolved(now)
    return changed


def _target_of(stages: Sequence[Stage]) -> dict[str, Any]:
    return next(stage.identity["target"] for stage in stages if "target" in stage.identity)  # the sweep's at the latest


def _model_of(target: dict[str, Any]) -> dict[str, Any]:
    """What says which model a target is, of all that `identify_target` says: settings such as its dtype may change under one name."""
    return {name: value for name, value in target.items() if name in ("package", "version", "hub", "commit", "folder")}


def check_local_resources(experiment: Experiment, planned: Sequence[PlannedStage]) -> None:
    """Raises ExperimentError if a stage to run asks for what a Ray on this machine alone does not have: its job would wait for ever."""
    cores, train = len(os.sched_getaffinity(0)), experiment.train
    if train is not None and train.workers > 1 and any(entry.stage.name == "train" and entry.state == "run" for entry in planned):
        asked_cpus = _cpus(experiment, "train")
        if asked_cpus > cores:
            raise ExperimentError(what=f"{train.workers} workers ask for {asked_cpus / train.workers:g} CPU cores each, this machine has {cores}", where="train.workers",
                                  fix="use fewer, or name a cluster that has them with --address")
    far = experiment.sweep.nodes > 1 or experiment.sweep.client == "other_node"
    if far and any(entry.stage.name == "sweep" and entry.state == "run" for entry in planned):
        raise ExperimentError(what=f"a sweep on {experiment.sweep.nodes} nodes, its client on the {experiment.sweep.client.replace('_', ' ')}, cannot run on this machine alone",
                              where="sweep.nodes, sweep.client", fix="use 1 and same_node, or name a cluster that has them with --address")
    for entry in planned:
        if entry.state != "run":
            continue
        streams = entry.stage.name == "train" and experiment.capture.mode == "stream"
        names = ["train", "capture"] if streams else [entry.stage.name]  # a stream's job holds both at once
        asked = [experiment.hardware.of_stage(name) for name in names]
        cpus = sum(_cpus(experiment, name) for name in names)
        lacking = [f"{cpus:g} CPU cores, this machine has {cores}"] if cpus > cores else []
        lacking += [f"the resource {name}, which only a cluster can declare" for each in asked for name, amount in each.custom.items() if amount > 0]
        if lacking:
            raise ExperimentError(what=f"the job of the stage {entry.stage.name} asks for {lacking[0]}",
                                  where=" and ".join(f"hardware.resources.{name}" for name in names), fix="ask for less, or name a cluster that has it with --address")


def _cpus(experiment: Experiment, stage: str) -> float:
    """CPU cores that a stage asks for, with all its workers, as worker_resources in backends/ray_training.py has it."""
    each, train = experiment.hardware.of_stage(stage).cpus, experiment.train
    return train.workers * (each or 1) if stage == "train" and train is not None and train.workers > 1 else each


def _check_target_fits(section: TargetSection, shape: TargetShape) -> None:
    """What vLLM would refuse when it starts: a context longer than the target's positions, heads that its devices cannot share evenly."""
    if section.max_model_len > shape.max_position_embeddings and shape.rope_parameters["rope_type"] == "default":
        raise ExperimentError(
            what=f"{section.max_model_len} tokens are more than the target has positions for, {shape.max_position_embeddings}",
            where="target.max_model_len",
            fix=f"use at most {shape.max_position_embeddings}",
        )
    if shape.attention_heads % section.tensor_parallel:
        raise ExperimentError(
            what=f"{section.tensor_parallel} devices cannot share the target's {shape.attention_heads} attention heads evenly",
            where="target.tensor_parallel",
            fix=f"use a divisor of {shape.attention_heads}",
        )


def _check_prompts_and_lengths(experiment: Experiment) -> None:
    """Every split that a stage reads has its prompts, the train split enough of them for a step, and every answer fits into the context with room for a prompt."""
    prompts = load_prompts_of(experiment)
    asked = [("sweep.report_prompts", "report", experiment.sweep.report_prompts)]
    lengths = {"sweep.answer_tokens": experiment.sweep.answer_tokens} | {workload.place("osl"): workload.osl for workload in experiment.sweep.workloads}
    if experiment.capture is not None:
        asked += [("capture.train_prompts", "train", experiment.capture.train_prompts), ("capture.choose_prompts", "choose", experiment.capture.choose_prompts)]
        lengths["capture.max_tokens"] = experiment.capture.max_tokens
    if experiment.train is not None:
        lengths["train.served_tokens"] = experiment.train.served_tokens
    if experiment.quantize is not None:
        asked.append(("prompts.path", "choose", None))
        lengths["quantize.served_tokens"] = experiment.quantize.served_tokens
    for field, split, limit in asked:
        try:
            prompts.split(split, limit)
        except ExperimentError as err:
            raise type(err)(what=err.what, where=f"{field} ({experiment.prompts.path})", fix=err.fix) from err
    if experiment.train is not None:
        answered, per_step = len(prompts.split("train", experiment.capture.train_prompts)), experiment.train.conversations_per_step
        if answered < per_step:
            raise ExperimentError(what=f"a step takes {per_step} conversations, and {answered} prompts of the train split are answered", where="train.conversations_per_step",
                                  fix=f"use at most {answered}, or more prompts ({experiment.prompts.path}, capture.train_prompts)")
    _check_workloads(experiment, prompts)
    for field, tokens in lengths.items():
        if tokens >= experiment.target.max_model_len:
            raise ExperimentError(
                what=f"{tokens} tokens of answer leave no room for a prompt in target.max_model_len = {experiment.target.max_model_len}",
                where=field,
                fix="lower it, or raise target.max_model_len",
            )


def _check_workloads(experiment: Experiment, prompts: PromptSet) -> None:
    """Every workload has a prompt for each request in flight, and its longest random prompt and answer fit into the context together."""
    highest = max(experiment.sweep.concurrency)
    for workload in experiment.sweep.workloads:
        if workload.kind == "random":
            if workload.isl + workload.osl > experiment.target.max_model_len:
                raise ExperimentError(what=f"{workload.isl} tokens of prompt and {workload.osl} of answer are more than target.max_model_len = {experiment.target.max_model_len}",
                                      where=workload.place("isl"), fix=f"raise target.max_model_len to at least {workload.isl + workload.osl}, or lower one of the two")
            continue
        found, _ = prompts_of(workload, experiment, prompts)
        if highest > len(found):
            raise too_few(workload, len(found), highest)


def check_prompts(experiment: Experiment, planned: Sequence[PlannedStage]) -> None:
    """Raises ExperimentError if the target is on this machine and its tokenizer or chat template is unfit, or makes a prompt too long, that a stage to run will need;
    if the vocabulary of a draft that will be trained has no room for the tokenizer's special tokens; and for a stream's queue that is too small for its answers."""
    folder = target_folder_on_disk(experiment.target)
    if folder is None or not any(entry.state == "run" and entry.stage.name != "report" for entry in planned):
        return
    from raysd.prompts.template import render
    from raysd.target import eos_token_ids, load_tokenizer, special_token_ids

    eos_token_ids(folder)
    tokenizer, prompts, shape = load_tokenizer(folder, experiment.target), load_prompts_of(experiment), read_shape(folder)
    if experiment.train is not None:
        check_special_tokens(draft_shape(experiment.draft, shape), special_token_ids(folder, tokenizer))
    capture, answers = experiment.capture, [section.served_tokens for section in (experiment.train, experiment.quantize) if section is not None]
    asked = [("report", experiment.sweep.report_prompts, experiment.sweep.answer_tokens)]
    if capture is not None:
        asked += [("train", capture.train_prompts, capture.max_tokens), ("choose", capture.choose_prompts, max([capture.max_tokens, *answers]))]
    elif answers:
        asked.append(("choose", None, max(answers)))
    lengths = {}
    for split, limit, tokens in asked:
        rendered = render(prompts.split(split, limit), tokenizer, experiment.target.max_model_len - tokens, f"{experiment.prompts.path} (prompts.path)")
        lengths[split] = list(map(len, rendered))
    for workload in experiment.sweep.workloads:
        ready_prompts(workload, experiment, prompts, tokenizer)
    if capture is not None and capture.mode == "stream":
        check_queue(experiment, most_bytes(experiment, lengths["train"], lengths["choose"], len(shape.aux_layers(experiment.draft.aux_layers)) + 1, shape.hidden_size))


def check_store(store: Store, experiment: Experiment, planned: Sequence[PlannedStage]) -> None:
    """Raises ArtifactError if the store cannot be written, or if its disk is too small for the stages that will run; a remote store has no end."""
    running = [entry.stage.name for entry in planned if entry.state == "run"]
    if running:
        store.check_writable()
        if not store.home.remote:
            check_disk(store.home.local(), need_bytes(running, experiment), f"the run ({', '.join(running)})")


def need_bytes(stages: Sequence[str], experiment: Experiment) -> int:
    """A rough need of disk for some stages, as far as it can be known: the target's width is not, before it is on this machine."""
    shape, conversations = target_shape_on_disk(experiment.target), _conversations(experiment)
    return sum(disk_need_bytes(stage, experiment, conversations, shape) for stage in stages)


def artifact_bytes(stages: Sequence[str], experiment: Experiment) -> dict[str, int | None]:
    """What each stage is expected to write; None where that depends on a target that is not on this machine yet."""
    shape, conversations = target_shape_on_disk(experiment.target), _conversations(experiment)
    return {stage: expected_bytes(stage, experiment, conversations, shape) for stage in stages}


def _conversations(experiment: Experiment) -> int:
    """How many the capture answers."""
    if experiment.capture is None:
        return 0
    prompts = load_prompts(experiment.prompts)
    return len(prompts.split("train", experiment.capture.train_prompts)) + len(prompts.split("choose", experiment.capture.choose_prompts))


def target_shape_on_disk(section: TargetSection) -> TargetShape | None:
    """The target's shape if its files are on this machine; None if they have yet to be fetched or converted."""
    folder = target_folder_on_disk(section)
    return None if folder is None else read_shape(folder)


def target_folder_on_disk(section: TargetSection) -> Path | None:
    """The target's folder if it is on this machine."""
    folder = cached_asset(*parse_asset(section.model)) if section.model.startswith("pypi:") else Path(section.model)
    return folder if (folder / "config.json").is_file() else None


def name_the_file(error: RaysdError, spec: Path) -> RaysdError:
    """The same error with the experiment file in `where`, for one that names only a field of it and no argument."""
    if isinstance(error, (ExperimentError, TargetError)) and str(spec) not in error.where and not error.where.startswith("--"):
        return type(error)(what=error.what, where=f"{spec}: {error.where}", fix=error.fix)
    return error
