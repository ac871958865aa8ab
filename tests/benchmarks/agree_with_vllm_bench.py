"""Whether raysd and `vllm bench serve` measure the same: on one live vLLM server, with the same prompts, taking turns.

Run: python tests/benchmarks/agree_with_vllm_bench.py [--target FOLDER] [--json]; with --json the only line is one object with, for output_tok_s, ttft_ms and
tpot_ms, `raysd` and `vllm_bench` (medians over rounds), `relative_difference` of their means of logarithms, and the half-width of its 95 % interval, `ci`.

The target is the demo's unless a folder is named. Both agree if each difference is within 3 %, or within its interval.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts.stage import no_progress
from raysd.backends.vllm_server import start_server
from raysd.experiment import load_experiment
from raysd.experiment.target import TargetSection
from raysd.prompts.prompt_set import load_prompts
from raysd.sweep.engine import engine_spec
from raysd.sweep.statistics import paired_ratio
from raysd.target import resolve_target

DEMO = Path(__file__).resolve().parents[2] / "jobs" / "smollm2-cpu.yaml"
ROUNDS, CONCURRENCY, OSL, PROMPTS = 6, 4, 64, 24
NAMES = ("output_tok_s", "ttft_ms", "tpot_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="another target's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    experiment = load_experiment(DEMO)
    section = experiment.target if args.target is None else TargetSection(model=str(args.target), max_model_len=512)
    experiment = experiment.model_copy(update={"target": section})
    target = resolve_target(section, no_progress)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tokenizer").symlink_to(target)
        texts = [" ".join(message["content"] for message in prompt.messages).replace("\n", " ") for prompt in load_prompts(experiment.prompts).split("report", PROMPTS)]
        (folder / "prompts.txt").write_text("\n".join(texts), encoding="utf-8")
        with start_server(engine_spec(experiment, target, None, None), folder / "vllm.log") as server:
            measured("raysd", server.address.url, server.model, folder)  # warms the engine up
            turns = [{side: measured(side, server.address.url, server.model, folder) for side in (("raysd", "vllm_bench") if number % 2 == 0 else ("vllm_bench", "raysd"))}
                     for number in range(ROUNDS)]
    told = {}
    for name in NAMES:
        sides = {side: [turn[side][name] for turn in turns] for side in ("raysd", "vllm_bench")}
        ratio = paired_ratio(sides["raysd"], sides["vllm_bench"], resample=False)
        told[name] = {side: statistics.median(values) for side, values in sides.items()} | {
            "relative_difference": ratio.ratio - 1, "ci": math.sinh(math.log(ratio.interval[1] / ratio.interval[0]) / 2)}
    agree = all(abs(each["relative_difference"]) <= max(0.03, each["ci"]) for each in told.values())
    if args.json:
        print(json.dumps(told | {"agree": agree}))
    else:
        for name, each in told.items():
            print(f"{name:<13} raysd {each['raysd']:.2f}  vllm bench {each['vllm_bench']:.2f}  difference {100 * each['relative_difference']:+.1f} % (95 % interval +-{100 * each['ci']:.1f} %)")
        print("they agree" if agree else "they do NOT agree")


def measured(side: str, url: str, model: str, folder: Path) -> dict[str, float]:
    """What one of the two says; it runs in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.load_sides", side, url, str(folder), "--model", model, "--prompts", str(folder / "prompts.txt"),
                           "--concurrency", str(CONCURRENCY), "--osl", str(OSL)], cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["failures"]:
        raise SystemExit(f"{side}: {told['failures']} requests failed")
    return told


if __name__ == "__main__":
    main()
