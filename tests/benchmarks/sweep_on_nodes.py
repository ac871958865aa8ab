"""How much sooner a sweep ends on three nodes than on one.

Run: python tests/benchmarks/sweep_on_nodes.py [--json]; with --json the only line is {"one_node_s": ..., "three_nodes_s": ..., "ratio": ...}.

Both are whole sweeps, from their beginning to the written tables, on mock engines that pace their tokens and compute nothing, so that three nodes fit onto
one machine: three raylets of one Ray cluster, or the stage's own process. What a node costs to open is in it; engines of a real target start in minutes, and
side by side on several nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts import FolderHome, Store
from tests.backends.sweep_driver import TRAIN
from tests.ray_nodes import Job, Nodes, three_nodes
from tests.records import publish_files
from tests.tiny_chain import UNHURRIED
from tests.tiny_models import tiny_llama

SWEEP = UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1, 2, 4], "k": [2], "blocks": 9, "requests_per_slot": 4, "workloads": [{"osl": 96, "ignore_eos": True}],
         "answer_tokens": 12, "engine": {"kv_cache_bytes": 2**26}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, three_nodes(Path(scratch) / "ray.log") as nodes:
        tiny_llama(Path(scratch) / "target")
        elapsed_s = {count: sweep_s(nodes, Path(scratch), count) for count in (1, 3)}
    ratio = elapsed_s[3] / elapsed_s[1]
    if args.json:
        print(json.dumps({"one_node_s": elapsed_s[1], "three_nodes_s": elapsed_s[3], "ratio": ratio}))
    else:
        print(f"one node {elapsed_s[1]:.0f} s, three nodes {elapsed_s[3]:.0f} s: {ratio:.2f} of the time")


def sweep_s(nodes: Nodes, scratch: Path, count: int) -> float:
    """Seconds that a sweep on so many nodes takes."""
    folder = scratch / f"nodes-{count}"
    folder.mkdir()
    rows = [{"id": f"q{index}", "topic": "t", "split": "report", "prompt": f"bado {index} kela"} for index in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sweep.yaml").write_text(yaml.safe_dump({
        "name": "tiny", "target": {"model": str(scratch / "target"), "max_model_len": 256}, "prompts": {"path": str(folder / "prompts.jsonl")}, "capture": {}, "train": {},
        "sweep": SWEEP | {"nodes": count}}))
    publish_files(Store(FolderHome(folder / "drafts")), TRAIN, {"draft/config.json": b"{}"})
    with Job(nodes, "tests.backends.sweep_driver", folder) as job:
        result = job.result()
    if result.get("valid_cells") != 54:
        raise SystemExit(f"the sweep on {count} nodes is not whole: {result}\n{job.log()[-3000:]}")
    return result["elapsed_s"]


if __name__ == "__main__":
    main()
