"""One side of a comparison of load generators, in a process of its own: `python -m tests.benchmarks.load_sides raysd|vllm_bench URL FOLDER [--prompts FILE ...]`.

Its last line of output is JSON: CPU seconds from the first request to the numbers, and the numbers. FOLDER/tokenizer is a tokenizer for vllm bench, which insists on one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from raysd.load.address import parse_address
from raysd.load.arrivals import Load
from raysd.load.metrics import summarise
from raysd.load.requests import Request
from raysd.load.run import run_load


def raysd(args: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    requests = [Request(f"q{number}", prompt, args.osl, 0.0, True) for number, prompt in enumerate(prompts)]
    begun_s = time.process_time()
    run = run_load(parse_address(args.url), args.model, requests, Load(concurrency=args.concurrency))
    metrics = summarise(run.results, args.concurrency)
    cpu_s = time.process_time() - begun_s
    return {"cpu_s": cpu_s, "failures": metrics.failures, "output_tok_s": metrics.output_tok_s, "ttft_ms": metrics.ttft_ms_p50, "tpot_ms": metrics.tpot_ms_p50}


def vllm_bench(args: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    asked = args.folder / "vllm-bench.jsonl"
    asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    known = parser.parse_args(["--backend", "openai", "--base-url", args.url, "--endpoint", "/v1/completions", "--model", args.model, "--tokenizer", str(args.folder / "tokenizer"),
                               "--dataset-name", "custom", "--dataset-path", str(asked), "--skip-chat-template", "--custom-output-len", str(args.osl), "--num-prompts", str(len(prompts)),
                               "--disable-shuffle", "--max-concurrency", str(args.concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--ready-check-timeout-sec", "0",
                               "--percentile-metrics", "ttft,tpot"])
    cpu_s = 0.0
    benchmark = serve.benchmark

    async def timed(*positional: Any, **named: Any) -> Any:
        nonlocal cpu_s
        begun_s = time.process_time()
        result = await benchmark(*positional, **named)
        cpu_s = time.process_time() - begun_s
        return result

    serve.benchmark = timed
    told = asyncio.run(serve.main_async(known))
    return {"cpu_s": cpu_s, "failures": len(prompts) - told["completed"], "output_tok_s": told["output_throughput"], "ttft_ms": told["median_ttft_ms"], "tpot_ms": told["median_tpot_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("raysd", "vllm_bench"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="mock")
    parser.add_argument("--prompts", type=Path, help="a text a line")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--osl", type=int, default=256)
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines() if args.prompts else [f"prompt number {number}" for number in range(args.requests)]
    print(json.dumps({"raysd": raysd, "vllm_bench": vllm_bench}[args.side](args, prompts)))


if __name__ == "__main__":
    main()
