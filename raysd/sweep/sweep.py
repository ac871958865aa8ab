"""The stage `sweep`: every arm's engine up together, greedy answers compared, and every cell measured in an order that hits all arms alike."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts.fingerprint import fingerprint
from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError, StageError
from raysd.experiment.sweep import Workload
from raysd.load.client import CompletionRequest, run_closed_loop
from raysd.prompts.prompt_set import Prompt
from raysd.prompts.template import render
from raysd.sweep import tables
from raysd.sweep.cells import cell_prompts, plan_cells, plan_engines
from raysd.sweep.engine import Server, StartServers, engine_spec
from raysd.sweep.kept import keep, kept
from raysd.sweep.lossless import Answer, Comparison, compare, counts, served_gap
from raysd.sweep.measure import REQUEST_TIMEOUT_S, measure_cell, run_counted, wait_until_idle
from raysd.sweep.provenance import provenance
from raysd.sweep.served import greedy_requests, refuse_failures
from raysd.target import load_tokenizer, resolve_target

Engine = tuple[str, int | None]
"""Arm and k."""

ANSWER_CONCURRENCY = 8
"""Requests in flight while the answers that are compared are asked for; the same for every arm."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Answers:
    """The greedy answers of one engine to the report split, and what it counted over them."""

    answers: list[Answer]
    counted: AcceptanceCounts


def sweep(run: StageRun, start_servers: StartServers) -> dict[str, Any]:
    """Measures every cell of the experiment's sweep; writes cells, requests, answers, lossless and acceptance as Parquet, provenance.json and logs/.

    run.inputs: `train` and `quantize` hold the drafts, as their arms need them. What is finished is kept as a piece, and a later attempt does
    not repeat it; an engine that dies ends the attempt with EngineError. Returns the metrics: acceptance and verdicts by arm for the first k, and counts.
    """
    section = run.experiment.sweep
    target = resolve_target(run.experiment.target, run.progress)
    tokenizer = load_tokenizer(target, run.experiment.target)
    prompts = run.prompts.split("report", section.report_prompts)
    specs = {engine: engine_spec(run.experiment, target, draft_folder(run, engine[0]), engine[1]) for engine in plan_engines(section)}
    workloads = {workload.name: _requests(run, prompts, tokenizer, workload) for workload in section.workloads}
    questions = greedy_requests(prompts, tokenizer, section.workloads[0].osl, run.experiment.target.max_model_len, run.experiment.prompts.path)
    run.progress(f"starting {len(specs)} engines: {', '.join(map(engine_name, specs))}")
    with start_servers([(spec, run.out / "logs" / f"{engine_name(engine)}.log") for engine, spec in specs.items()]) as started:
        servers = dict(zip(specs, started, strict=True))
        _warm_up(run, servers, questions)
        answers = {engine: _answers(run, engine, server, questions) for engine, server in servers.items()}
        comparisons = _comparisons(run, answers, servers["none", None], questions)
        cell_rows, request_rows = _measure(run, servers, workloads)
        facts = provenance({engine_name(engine): server for engine, server in servers.items()})
    _write(run.out, cell_rows, request_rows, answers, comparisons, facts)
    return _metrics(section.k[0], cell_rows, answers, comparisons, {name: engine["start_s"] for name, engine in facts["engines"].items()})


def engine_name(engine: Engine) -> str:
    """A name for logs and tables: `none`, `bf16-k3`."""
    arm, k = engine
    return arm if k is None else f"{arm}-k{k}"


def draft_folder(run: StageRun, arm: str) -> Path | None:
    """The checkpoint that an arm drafts with; None for `none`. Raises StageError if the stage that makes it was not run."""
    if arm == "none":
        return None
    if arm == "bf16" and run.experiment.draft.checkpoint is not None:
        return run.experiment.draft.checkpoint
    stage = {"bf16": "train", "fp8": "quantize"}[arm]
    if stage not in run.inputs:
        raise StageError(what=f"the arm {arm} has no draft: the stage {stage} gave nothing", where="sweep.arms", fix=f"run the stage {stage} first, or remove the arm")
    folder = run.inputs[stage] / "draft"
    if not (folder / "config.json").is_file():
        raise StageError(what=f"the artifact of the stage {stage} holds no draft", where=folder, fix=f"delete the artifact to run the stage {stage} again")
    return folder


def _requests(run: StageRun, prompts: Sequence[Prompt], tokenizer: Any, workload: Workload) -> list[CompletionRequest]:
    experiment = run.experiment
    rendered = render(prompts, tokenizer, experiment.target.max_model_len - workload.osl, experiment.prompts.path)
    return [CompletionRequest(prompt.id, tuple(token_ids), workload.osl, experiment.sweep.temperature, workload.ignore_eos)
            for prompt, token_ids in zip(prompts, rendered, strict=True)]


def _warm_up(run: StageRun, servers: Mapping[Engine, Server], questions: Sequence[CompletionRequest]) -> None:
    """Every engine meets every batch size that it will be measured at, with other lengths than the first request of a cell."""
    for (arm, k), server in servers.items():
        run.progress(f"warming up {engine_name((arm, k))}")
        for concurrency in run.experiment.sweep.concurrency_of(arm):
            short = [CompletionRequest(each.prompt_id, each.prompt_token_ids, min(WARM_UP_TOKENS, each.max_tokens), 0.0, True)
                     for each in (questions[index % len(questions)] for index in range(concurrency))]
            refuse_failures(run_closed_loop(server.base_url, server.model, short, concurrency, REQUEST_TIMEOUT_S), server.log_path)
    wait_until_idle(list(servers.values()))


def _answers(run: StageRun, engine: Engine, server: Server, questions: Sequence[CompletionRequest]) -> Answers:
    identity = {"engine": engine_name(engine), "requests": _requests_identity(questions)}
    document = kept(run, "answers", identity)
    if document is None:
        run.progress(f"{engine_name(engine)} answers the {len(questions)} prompts of the report split")
        concurrency = min(ANSWER_CONCURRENCY, run.experiment.sweep.engine.max_num_seqs)
        results, counted = run_counted(server, questions, concurrency)
        refuse_failures(results, server.log_path)
        if engine[1] is not None and counted.drafts == 0:  # found now rather than after an hour of cells
            raise EngineError(what=f"the engine {engine_name(engine)} answered {len(results)} prompts and counted no draft", where=server.log_path,
                              fix="check in the log that the draft was loaded")
        document = {"answers": [[result.prompt_id, list(result.token_ids), result.finish_reason] for result in results],
                    "counted": [counted.drafts, counted.draft_tokens, counted.accepted, list(counted.per_position)]}
        keep(run, "answers", identity, document)
    *totals, per_position = document["counted"]
    return Answers([Answer(prompt_id, tuple(token_ids), reason) for prompt_id, token_ids, reason in document["answers"]],
                   AcceptanceCounts(*totals, tuple(per_position)))


def _comparisons(run: StageRun, answers: Mapping[Engine, Answers], baseline: Server, questions: Sequence[CompletionRequest]) -> dict[Engine, list[Comparison]]:
    run.progress("comparing the answers with the baseline's")
    gap = served_gap(baseline.base_url, baseline.model)
    none = answers["none", None].answers
    return {engine: [compare(of_none, of_arm, question.prompt_token_ids, run.experiment.sweep.near_tie_nat, gap)
                     for of_none, of_arm, question in zip(none, given.answers, questions, strict=True)]
            for engine, given in answers.items() if engine[0] != "none"}


def _measure(run: StageRun, servers: Mapping[Engine, Server], workloads: Mapping[str, list[CompletionRequest]]) -> tuple[list[dict], list[dict]]:
    """Rows of all cells and of their requests. Cells that are compared with each other are kept, and measured again, together: all by one attempt."""
    cells = plan_cells(run.experiment.sweep)
    cell_rows: list[dict] = []
    request_rows: list[dict] = []
    for _, compared in itertools.groupby(enumerate(cells), key=lambda entry: (entry[1].block, entry[1].workload, entry[1].concurrency)):
        group = list(compared)
        requests = cell_prompts(workloads[group[0][1].workload], group[0][1])  # the same for every arm
        identity = {"cells": [cell.identity() for _, cell in group], "requests": _requests_identity(requests)}
        document = kept(run, "cells", identity)
        if document is None:
            document = {"cells": [], "requests": []}
            for order, cell in group:
                run.progress(cell.label(), order, len(cells), "cells")
                row, rows = measure_cell(cell, order, requests, servers[cell.arm, cell.k], list(servers.values()))
                document["cells"].append(row)
                document["requests"] += rows
            if all(row["valid"] for row in document["cells"]):  # an invalid one is measured again by the next attempt
                keep(run, "cells", identity, document)
        cell_rows += document["cells"]
        request_rows += document["requests"]
    run.progress("all cells are measured", len(cells), len(cells), "cells")
    return cell_rows, request_rows


def _requests_identity(requests: Sequence[CompletionRequest]) -> str:
    return fingerprint([[each.prompt_id, list(each.prompt_token_ids), each.max_tokens, each.temperature, each.ignore_eos] for each in requests])


def _write(out: Path, cell_rows: list[dict], request_rows: list[dict], answers: Mapping[Engine, Answers], comparisons: Mapping[Engine, list[Comparison]],
           facts: dict[str, Any]) -> None:
    tables.write_table(out / "cells.parquet", tables.CELLS, cell_rows)
    tables.write_table(out / "requests.parquet", tables.REQUESTS, request_rows)
    tables.write_table(out / "answers.parquet", tables.ANSWERS, [
        {"arm": arm, "k": k, "prompt_id": answer.prompt_id, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason}
        for (arm, k), given in answers.items() for answer in given.answers])
    tables.write_table(out / "lossless.parquet", tables.LOSSLESS, [
        {"arm": arm, "k": k, "prompt_id": each.prompt_id, "verdict": each.verdict, "position": each.difference and each.difference.position,
         "token_none": each.difference and each.difference.token_none, "token_arm": each.difference and each.difference.token_arm, "gap_nat": each.gap_nat}
        for (arm, k), compared in comparisons.items() for each in compared])
    tables.write_table(out / "acceptance.parquet", tables.ACCEPTANCE, [
        {"arm": arm, "k": k, **given.counted.as_metrics()} for (arm, k), given in answers.items() if arm != "none"])
    (out / "provenance.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")


def _metrics(first_k: int, cell_rows: list[dict], answers: Mapping[Engine, Answers], comparisons: Mapping[Engine, list[Comparison]],
             start_s: dict[str, float]) -> dict[str, Any]:
    gaps = [each.gap_nat for compared in comparisons.values() for each in compared if each.gap_nat is not None]
    return {"acceptance": {arm: {"k": k, **given.counted.as_metrics()} for (arm, k), given in answers.items() if k == first_k},
            "lossless": {arm: counts(compared) for (arm, k), compared in comparisons.items() if k == first_k},
            "largest_gap_nat": max(gaps, default=None), "cells": len(cell_rows), "valid_cells": sum(row["valid"] for row in cell_rows),
            "engine_start_s": start_s}
