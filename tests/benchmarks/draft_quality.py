"""How good the demo's draft is after how long: `python tests/benchmarks/draft_quality.py [--json]`, about 45 minutes on two cores.

Runs the capture and train jobs of jobs/smollm2-cpu.yaml, training with three seeds, and serves each draft on the report split, on which nothing was
chosen. Reported is the seed with the shortest acceptance length. `elapsed_s` is the wall time of the capture job and of the slowest train job, imports
included, without what serving the checkpoints took (settings and checkpoint are chosen on the choose split).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts import FolderHome, Store
from raysd.artifacts.stage import no_progress
from raysd.backends.vllm_server import start_server
from raysd.experiment import Experiment, dump_experiment, load_experiment
from raysd.pipeline.preflight import chain_of
from raysd.sweep.served import make_served_acceptance
from raysd.target import load_tokenizer, resolve_target

ROOT, SEEDS = Path(__file__).resolve().parents[2], (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--store", type=Path, help="a folder to work in and keep; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.store or Path(scratch)
        if (folder / "runs").exists():
            parser.error(f"--store: {folder} holds the jobs of another run, which would be found and take no time; name an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        base = load_experiment(ROOT / "jobs" / "smollm2-cpu.yaml")
        resolve_target(base.target, no_progress)  # fetching and converting it is no part of either
        capture_s, found = 0.0, []
        for seed in SEEDS:
            experiment = base.model_copy(update={"train": base.train.model_copy(update={"seed": seed})})
            spec = folder / f"seed-{seed}.yaml"
            spec.write_text(dump_experiment(experiment), encoding="utf-8")
            if seed == SEEDS[0]:
                capture_s = job("capture", spec, folder)
            train_s = job("train", spec, folder)
            found.append(measure(experiment, folder, capture_s, train_s) | {"seed": seed})
            if not args.json:
                print(", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    worst = min(found, key=lambda each: each["acceptance_length"])
    result = {"elapsed_s": max(each["elapsed_s"] for each in found), "acceptance_length": worst["acceptance_length"], "per_position": worst["per_position"]}
    print(json.dumps(result) if args.json else f"lowest of {len(SEEDS)} seeds: {result}")


def job(stage: str, spec: Path, store: Path) -> float:
    """Runs a stage's script; returns its wall time in seconds."""
    started_s = time.monotonic()
    log = store / f"{stage}-{spec.stem}.log"
    with log.open("w") as lines:
        done = subprocess.run([sys.executable, ROOT / "jobs" / f"{stage}.py", "--experiment", spec, "--store", store / "runs"], stdout=lines, stderr=lines, cwd=ROOT)
    if done.returncode:
        sys.exit(f"the {stage} job ended with exit code {done.returncode}; its last lines:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    return time.monotonic() - started_s


def measure(experiment: Experiment, folder: Path, capture_s: float, train_s: float) -> dict[str, object]:
    """The acceptance of the trained draft on the report split, served under the conditions of training's own measurement."""
    chain, store = chain_of(experiment), Store(FolderHome(folder / "runs"))
    key = next(stage.key for stage in chain.stages if stage.name == "train")
    record, draft = store.record(key), store.open(key) / "draft"
    target = resolve_target(experiment.target, no_progress)
    served_acceptance = make_served_acceptance(experiment, target, load_tokenizer(target, experiment.target), start_server, folder / "logs", no_progress,
                                               experiment.train.served_tokens)
    counts = served_acceptance(draft, chain.prompts.split("report"), experiment.train.served_k)
    per_position = [round(accepted / counts.drafts, 3) for accepted in counts.per_position]
    return {"elapsed_s": round(capture_s + train_s - record.metrics["serving_s"], 1), "acceptance_length": round(counts.acceptance_length, 3),
            "per_position": per_position, "choose_acceptance_length": round(record.metrics["served"]["acceptance_length"], 3)}


if __name__ == "__main__":
    main()
