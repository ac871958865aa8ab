"""How the memory of the train stage grows with the data set: peak resident memory with ten times the conversations, against once.

Run: python tests/benchmarks/train_memory.py [--json]. With --json the only line is {"rss_ratio_10x": ...}; without it, what the peaks are made of, too.

The real stage function trains on real shards, tens of MB of them and hundreds of MB, with the same batches and the same number of steps, which takes the
larger set through one whole epoch: whoever kept what was read, all rows or all states, would show. Each training has a process of its own, whose peak
is the kernel's (VmHWM); the sets alternate in rounds, and the ratio is of the medians. Only the served acceptance is made up: it needs an engine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from raysd.backends.ray_training import learn_on_workers
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.train import train
from raysd.experiment import load_experiment
from raysd.hidden_states.shards import Conversation, Origin, write_index, write_shard
from tests.stage_runs import attempt
from tests.tiny_chain import write_experiment
from tests.tiny_drafts import captured_from

CONVERSATIONS = {"1x": 400, "10x": 4000}
"""Of the train split; the choose split has a tenth as many."""
PER_STEP, PER_SHARD = 40, 60
ROUNDS = 2
SAMPLE_EVERY_S = 0.01
PARTS = {"anonymous": "RssAnon", "mapped files": "RssFile", "shared": "RssShmem"}
"""What /proc calls the parts of resident memory. Pages of mapped files are the page cache's own: the kernel takes them back when it needs memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        section = {"steps": max(CONVERSATIONS.values()) // PER_STEP, "conversations_per_step": PER_STEP, "ttt_steps": 2, "evaluations": 2, "served_k": 2,
                   "threads": 1}
        experiment = write_experiment(folder, train=section, draft={"vocab_size": 256, "aux_layers": [1, 2, 3], "intermediate_size": 64})
        origin = captured_from(load_experiment(experiment).target, [1, 2, 3])
        mb = {size: write_captured(folder / size, count, origin) / 1e6 for size, count in CONVERSATIONS.items()}
        peaks: dict[str, list[dict[str, float]]] = {size: [] for size in CONVERSATIONS}
        for number in range(ROUNDS):
            for size in CONVERSATIONS if number % 2 == 0 else reversed(CONVERSATIONS):
                # A process each: a peak never falls again.
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    peaks[size].append(process.submit(peaks_mb, experiment, folder / size, folder / f"store-{size}-{number}").result())
    medians = {size: {part: statistics.median(each[part] for each in peaks[size]) for part in peaks[size][0]} for size in CONVERSATIONS}
    ratio = medians["10x"]["total"] / medians["1x"]["total"]
    if args.json:
        print(json.dumps({"rss_ratio_10x": round(ratio, 3)}))
        return
    for size, count in CONVERSATIONS.items():
        runs = ", ".join(f"{each['total']:,.0f}" for each in peaks[size])
        parts = ", ".join(f"{part} {medians[size][part]:,.0f} MB" for part in ("before", *PARTS))
        print(f"{size}: {count:,} conversations, {mb[size]:,.0f} MB of shards: peak {medians[size]['total']:,.0f} MB (runs: {runs}); peaks of the parts: {parts}")
    print(f"ratio {ratio:.3f}; {section['steps']} steps of {PER_STEP} conversations, {ROUNDS} rounds, load {os.getloadavg()[0]:.1f}")


def write_captured(folder: Path, conversations: int, origin: Origin) -> int:
    """Writes shards of the tiny target's states, as the capture stage leaves them; returns their bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    splits = ["train"] * conversations + ["choose"] * (conversations // 10)
    for start in range(0, len(splits), PER_SHARD):
        write_shard(folder / f"shard-{start // PER_SHARD:05d}.safetensors", [
            Conversation(f"{split}{start + i}", "topic", split, torch.randint(3, 512, (tokens,), generator=generator), 40, "stop",
                         torch.randn(tokens - 1, 4, 64, generator=generator).to(torch.bfloat16))
            for i, split in enumerate(splits[start:start + PER_SHARD]) for tokens in [146 + 10 * (i % 5)]], origin)
    write_index(folder)
    return sum(shard.stat().st_size for shard in folder.glob("shard-*"))


def peaks_mb(experiment: Path, captured: Path, store: Path) -> dict[str, float]:
    """Runs the stage in this process: `total`, its peak resident memory; `before`, the peak when it began; and the peak of each part, sampled, in MB."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the stage prints is no result
    found = {"before": resident_mb()["VmHWM"], **dict.fromkeys(PARTS, 0.0)}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            now = resident_mb()
            for part, name in PARTS.items():
                found[part] = max(found[part], now[name])

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with attempt(store, load_experiment(experiment), {"capture": captured}) as run:
            train(run, lambda draft, prompts, k: AcceptanceCounts(10, 10 * k, 5, (5,) + (0,) * (k - 1)), learn_on_workers)
    finally:
        ended.set()
        sampler.join()
    return found | {"total": resident_mb()["VmHWM"]}


def resident_mb() -> dict[str, float]:
    """VmHWM, RssAnon and so on of this process."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 / 1e6 for line in lines if line[-1] == "kB"}


if __name__ == "__main__":
    main()
