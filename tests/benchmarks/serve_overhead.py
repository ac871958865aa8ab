"""What Ray Serve costs: `raysd serve` against a plain vLLM server with the same engine arguments, both up, taking turns.

Run: python tests/benchmarks/serve_overhead.py [--tiny] [--without-haproxy] [--json]; with --json the only line on standard output is one object with
`output_ratio` (output_tok_s of Serve by that of the plain server) and `added_ttft_ms` (difference of the medians), each at concurrency `1` and `8`: medians
over rounds.

The target is the demo's, without a draft: a chunk carries one token, so there are as many chunks to a token as can be. --tiny: a random one that starts at
once, for a look at the script. --without-haproxy: on a Ray that was started as it comes, where requests pass Serve's own proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts.stage import no_progress
from raysd.backends.serve_cluster import served_here
from raysd.backends.vllm_server import free_port, start_server
from raysd.deployment.cluster import HAPROXY
from raysd.deployment.config_file import serve_config
from raysd.experiment import Experiment, load_experiment
from raysd.experiment.serve import ServeSection
from raysd.experiment.target import TargetSection
from raysd.load.address import parse_address
from raysd.load.arrivals import Load
from raysd.load.bench import Asked, bench
from raysd.load.run import Limits
from raysd.sweep.engine import engine_spec
from raysd.target import resolve_target

DEMO = Path(__file__).resolve().parents[2] / "jobs" / "smollm2-cpu.yaml"
CONCURRENCY, ISL, OSL = (1, 8), 32, 64
REQUESTS = {1: 10, 8: 48}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random target, one round")
    parser.add_argument("--without-haproxy", action="store_true", help="on a Ray without HAProxy")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        experiment = to_serve(Path(scratch), args.tiny)
        spec = engine_spec(experiment, resolve_target(experiment.target, no_progress), None, None)
        variables = {HAPROXY: "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"} if args.without_haproxy else {}
        with (start_server(spec, Path(scratch) / "vllm.log") as plain,
              served_here(experiment, serve_config(experiment, spec, len(os.sched_getaffinity(0))), lambda line: print(line, file=sys.stderr, flush=True), variables) as (url, _)):
            urls = {"plain": plain.address.url, "serve": url}
            for each in urls.values():
                measured(each, 8, 1)  # warms up
            turns = [turn(urls, number) for number in range(1 if args.tiny else args.rounds)]
    told = {"output_ratio": {str(c): round(statistics.median(each[c]["serve"]["output_tok_s"] / each[c]["plain"]["output_tok_s"] for each in turns), 4) for c in CONCURRENCY},
            "added_ttft_ms": {str(c): round(statistics.median(each[c]["serve"]["ttft_ms_p50"] - each[c]["plain"]["ttft_ms_p50"] for each in turns), 3) for c in CONCURRENCY}}
    if args.json:
        print(json.dumps(told))
        return
    for c in CONCURRENCY:
        figures = {side: {name: statistics.median(each[c][side][name] for each in turns) for name in ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50")} for side in ("plain", "serve")}
        print(f"concurrency {c}: output_tok_s {told['output_ratio'][str(c)]:.3f}x, TTFT {told['added_ttft_ms'][str(c)]:+.1f} ms")
        for side, values in figures.items():
            print(f"    {side:<6}" + "  ".join(f"{name} {value:.2f}" for name, value in values.items()))


def to_serve(folder: Path, tiny: bool) -> Experiment:
    """The demo's experiment without its draft, served on a free port."""
    experiment = load_experiment(DEMO)
    changes: dict[str, Any] = {"serve": ServeSection(arm="none", port=free_port())}
    if tiny:
        from tests.tiny_models import tiny_llama

        changes["target"] = TargetSection(model=str(tiny_llama(folder / "target")), max_model_len=512)
        engine = experiment.sweep.engine.model_copy(update={"enforce_eager": True, "kv_cache_bytes": 2**28})
        changes["sweep"] = experiment.sweep.model_copy(update={"engine": engine})
    return experiment.model_copy(update=changes)


def turn(urls: dict[str, str], number: int) -> dict[int, dict[str, dict[str, Any]]]:
    """Both sides at each concurrency; who is first changes from turn to turn."""
    sides = list(urls) if number % 2 == 0 else list(urls)[::-1]
    return {c: {side: measured(urls[side], c, number) for side in sides} for c in CONCURRENCY}


def measured(url: str, concurrency: int, seed: int) -> dict[str, Any]:
    """What a load of that concurrency made of a server."""
    asked = Asked(isl=ISL, osl=OSL, endpoint="completions", requests=REQUESTS[concurrency], ignore_eos=True, seed=seed)
    told, _ = bench(parse_address(url, None), asked, Load(concurrency), Limits())
    assert told["failures"] == 0, told["invalid_reasons"]
    return told


if __name__ == "__main__":
    main()
