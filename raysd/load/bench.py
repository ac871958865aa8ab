"""`raysd bench URL`: a load on any OpenAI-compatible server, and what came of it as a document and a table."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from raysd.draft.acceptance import add_positions
from raysd.errors import ArtifactError, ExperimentError
from raysd.experiment.sweep import LARGEST_LAG_MS, LARGEST_REPEATING_FRAC, SMALLEST_CONCURRENCY_FRAC
from raysd.load.address import Address
from raysd.load.arrivals import Load
from raysd.load.ask import served_model
from raysd.load.health import answer_reasons, client_reasons, rate_reasons
from raysd.load.metrics import kept_rate_frac, request_row, summarise
from raysd.load.requests import Request, Result
from raysd.load.run import Limits, RunLoad, run_load

REQUESTS_PER_SLOT = 10
"""If nobody says how many: as InferenceX has it."""
FILES = ("requests.jsonl", "bench.json")
"""Of a bench's results, the last one written last."""
PROBE_BYTES = 2**20
"""What must fit before a load begins; a request makes a kilobyte or several."""
WORDS = ("able about above across act add after again age air all along also always among animal answer any apple area arm ask away back base bear beat bed been begin bell best "
         "bird black blue boat body bone book born both box boy bring brown build busy call came camp can car care case cat catch cause cell chair check child city class clear "
         "climb clock cloud coast cold come cook cool copy corn cost count cover cow crop cross cry cut dance dark day deal dear deep desk did die dog done door down draw dream "
         "dress drink drive drop dry duck each ear early earth east easy eat edge egg else end even ever eye face fact fall farm fast").split()


@dataclass(frozen=True)
class Asked:
    """What a bench asks for."""

    model: str | None = None
    """None: the only one that is served."""
    prompts: Sequence[str | tuple[dict[str, str], ...]] = ()
    """Texts or chat messages; none: random words."""
    isl: int = 256
    """Words of a random prompt; most tokenizers make about as many tokens of them."""
    osl: int = 128
    endpoint: Literal["chat", "completions"] = "chat"
    requests: int | None = None
    """None: ten for each in flight, or a hundred at a rate; of one's own prompts each once at most."""
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    plain: bool = False
    """Only what every OpenAI-compatible server knows."""


def bench(address: Address, asked: Asked, load: Load, limits: Limits, run: RunLoad = run_load) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document of a load, JSON-ready, and a row of each request. run: what puts it on the server.

    The document: what was asked for, the metrics (None where there is nothing to compute one from), the acceptance of drafts where the server tells it of each
    request, the client's health, `valid` and the reasons if it is not. Raises ExperimentError for what cannot be asked: a server that is not OpenAI-compatible, a model
    that it does not have, more in flight than requests or prompts, a rate that its ramp never reaches.
    """
    model = served_model(address, asked.model)
    requests = make_requests(asked, load)
    if load.concurrency is not None and asked.prompts and load.concurrency > len(asked.prompts):
        raise ExperimentError(what=f"{load.concurrency} requests are to be in flight, and there are {len(asked.prompts)} prompts", where="--concurrency",
                              fix=f"use at most {len(asked.prompts)}, or more prompts")
    if load.concurrency is not None and load.concurrency > len(requests):
        raise ExperimentError(what=f"{load.concurrency} requests are to be in flight, and there are {len(requests)}", where="--concurrency",
                              fix=f"use at most {len(requests)}, or more --requests")
    load.check_count(len(requests))
    made = run(address, model, requests, load, limits, asked.plain)
    metrics = summarise(made.results, load.concurrency)
    reasons = [*answer_reasons(made.results, requests, LARGEST_REPEATING_FRAC),
               *client_reasons(metrics, made.health, load.concurrency, LARGEST_LAG_MS, SMALLEST_CONCURRENCY_FRAC, load.ramp_s),
               *(rate_reasons(made.results, made.health, LARGEST_LAG_MS) if load.rate_s is not None else ())]
    good = [result for result in made.results if result.error is None]
    told = {"url": address.url, "model": model, "endpoint": requests[0].path, **asdict(load), "osl": asked.osl, "isl": sum(result.prompt_tokens for result in good) / len(good) if good else None,
            **asdict(metrics), "kept_rate_frac": kept_rate_frac(made.results) if load.rate_s is not None else None, **told_acceptance(good), "client": asdict(made.health) | {"cpu_us_per_chunk": made.health.cpu_us_per_chunk}, "valid": not reasons, "invalid_reasons": reasons}
    begun_ns = min(result.dispatched_ns for result in made.results)
    return told, [request_row(result, begun_ns) for result in made.results]


def make_requests(asked: Asked, load: Load) -> list[Request]:
    """The requests: prompts in turn, from the first again when they run out, or random words, each its own. Raises ExperimentError for none, what
    no plain server knows, and messages that `/v1/completions` does not take."""
    default = REQUESTS_PER_SLOT * load.concurrency if load.concurrency is not None else 100
    if asked.prompts:
        default = min(default, len(asked.prompts))
    count = asked.requests if asked.requests is not None else default
    if asked.plain and asked.ignore_eos:
        raise ExperimentError(what="not every OpenAI-compatible server knows it, and --plain sends only what all know", where="--ignore-eos", fix="remove one of the two")
    if count < 1:
        raise ExperimentError(what=f"{count} requests", where="--requests", fix="use at least 1")
    if asked.prompts and asked.endpoint == "completions" and any(len(prompt) > 1 for prompt in asked.prompts if not isinstance(prompt, str)):
        raise ExperimentError(what="a conversation of several messages is no prompt of /v1/completions", where="--endpoint", fix="use --endpoint chat")
    generator = random.Random(asked.seed)
    requests = []
    for number in range(count):
        if asked.prompts:
            prompt = asked.prompts[number % len(asked.prompts)]
        else:
            prompt = " ".join(generator.choice(WORDS) for _ in range(asked.isl))
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        requests.append(Request(f"q{number}", messages if asked.endpoint == "chat" else messages[0]["content"], asked.osl, asked.temperature, asked.ignore_eos,
                                asked.seed + number if asked.temperature > 0 else None))
    return requests


def told_acceptance(results: Sequence[Result]) -> dict[str, Any]:
    """drafts, accepted, per_position and acceptance_length over some requests; all None if the server does not tell them of each (vLLM's `--per-request-spec-decode-metrics`)."""
    if not results or any(result.drafts is None for result in results):
        return dict.fromkeys(("drafts", "accepted", "per_position", "acceptance_length"))
    drafts, per_position = add_positions({"drafts": result.drafts, "per_position": result.per_position} for result in results)
    return {"drafts": drafts, "accepted": sum(per_position), "per_position": per_position, "acceptance_length": 1 + sum(per_position) / drafts if drafts else None}


def check_output(folder: Path) -> None:
    """Raises ExperimentError if the results could not be written there, which is to be known before a load that takes hours. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if taken := [name for name in FILES if (folder / name).is_dir()]:
            raise IsADirectoryError(f"{taken[0]} is a folder there")
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as err:
        raise ExperimentError(what=f"the results could not be written: {err}", where=f"--output {folder}", fix="name another folder, or make this one writable and free some space") from err


def write_bench(folder: Path, told: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes requests.jsonl and, last, bench.json: where that is, both are whole and of one load. Raises ArtifactError if the folder cannot be written."""
    contents = ("".join(json.dumps(row) + "\n" for row in rows), json.dumps(told, indent=1))
    parts = [folder / f".{name}.{os.getpid()}.part" for name in FILES]
    try:
        with contextlib.ExitStack() as leftovers:
            for part, content in zip(parts, contents, strict=True):
                leftovers.callback(part.unlink, missing_ok=True)
                with part.open("w", encoding="utf-8") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            (folder / FILES[-1]).unlink(missing_ok=True)  # of an earlier load, beside requests that are no longer its
            for part, name in zip(parts, FILES, strict=True):
                part.replace(folder / name)
    except OSError as err:
        raise ArtifactError(what=f"the results cannot be written: {err}", where=f"--output {folder}", fix="they are on standard output, except for the single requests; free some space") from err


def bench_lines(told: dict[str, Any]) -> list[str]:
    """The document for people."""
    def figure(name: str, digits: int = 1) -> str:
        return "-" if told[name] is None else f"{told[name]:,.{digits}f}"

    load = f"concurrency {told['concurrency']}" if told["concurrency"] is not None else f"{told['rate_s']:g} requests a second, {told['arrivals']}"
    client = told["client"]
    lines = [f"{told['model']} at {told['url']}{told['endpoint']}, {load}: {told['requests']} requests in {told['elapsed_s']:.1f} s, {told['failures']} failed", "",
             f"output_tok_s         {figure('output_tok_s')}" + ("" if told["window_output_tok_s"] is None else f"   in the steady window of {told['window_s']:.1f} s: {figure('window_output_tok_s')}"),
             f"total_tok_s          {figure('total_tok_s')}", f"ISL, OSL (mean)      {figure('isl')}, {told['output_tokens'] / max(1, told['requests'] - told['failures']):,.1f}", "",
             "                     p50        p90        p99"]
    for name, title in (("ttft_ms", "TTFT, ms"), ("tpot_ms", "TPOT, ms"), ("e2el_ms", "E2EL, ms")):
        lines.append(f"{title:<21}" + " ".join(f"{figure(f'{name}_p{rank}'):<10}" for rank in (50, 90, 99)).rstrip())
    lines.append(f"{'step, ms':<21}{figure('step_ms_p50'):<10} {'':<10} {figure('step_ms_p99')}")
    if told["acceptance_length"] is not None:
        lines.append(f"acceptance length    {figure('acceptance_length', 3)}   of {told['drafts']:,} drafts")
    cost = "-" if client["cpu_us_per_chunk"] is None else f"{client['cpu_us_per_chunk']:.0f} us of CPU a chunk"
    lines += ["", f"client: {cost}, event loop at most {client['loop_lag_ms_p99']:.1f} ms late and requests sent {client['dispatch_delay_ms_p99']:.1f} ms late (99th percentiles)"]
    return lines + ["valid" if told["valid"] else "NOT VALID: " + "; ".join(told["invalid_reasons"])]
