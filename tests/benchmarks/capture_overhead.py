"""What capturing costs beside plain generation: `python tests/benchmarks/capture_overhead.py [--json]`, about 8 minutes on two cores.

Both sides answer the demo's prompts, a shard at a time, with the demo's engines (as many, on the same cores, with the same sequences, context and KV memory,
eager): the plain ones without a speculative config, a connector, a scheduler and a sampler of ours. All engines are up at once and the sides take turns, shard
after shard; the ratio is of the medians of output tokens a second. The capture side is the real one: its time ends when every state has been read back and checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from raysd.artifacts.stage import no_progress
from raysd.backends.cpu_engine import cpu_environment, share
from raysd.backends.vllm_capture import capture_engine, engine_arguments
from raysd.experiment import Experiment, load_experiment
from raysd.hidden_states.capture import Answer, Request
from raysd.hidden_states.shards import Conversation
from raysd.hidden_states.verify import check_conversation
from raysd.prompts.prompt_set import load_prompts
from raysd.prompts.template import render
from raysd.target import load_tokenizer, read_shape, resolve_target

ROOT = Path(__file__).resolve().parents[2]
GROUPS, WARMUP = 4, 32
CAPTURE_ONLY = ("speculative_config", "kv_transfer_config", "scheduler_cls", "worker_extension_cls", "async_scheduling")
"""Engine arguments that plain generation does without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--groups", type=int, default=GROUPS, help="rounds in which each side answers one shard's prompts")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        plain_engine(Connection(args.worker))
        return
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the engines say is no result
    experiment = load_experiment(ROOT / "jobs" / "smollm2-cpu.yaml")
    target = resolve_target(experiment.target, no_progress)
    shape = read_shape(target)
    layer_ids = shape.aux_layers(experiment.draft.aux_layers) + [shape.layers]
    size = experiment.capture.shard_conversations
    prompts = render(load_prompts(experiment.prompts).split("train", args.groups * size), load_tokenizer(target, experiment.target),
                     experiment.target.max_model_len - experiment.capture.max_tokens, experiment.prompts.path)
    tok_s: dict[str, list[float]] = {"plain": [], "capture": []}
    with tempfile.TemporaryDirectory() as scratch, capture_engine(experiment, target, layer_ids, Path(scratch)) as capturing, plain_engines(experiment, target) as plain:
        sides = {"plain": lambda group: answer_plainly(plain, group, experiment), "capture": lambda group: sum(
            checked(answer, len(group[answer.index]), len(layer_ids), shape.hidden_size) for answer in capturing.answers([[Request(prompt, 0) for prompt in group]]))}
        for side in sides.values():
            side(prompts[:WARMUP])
        for number in range(args.groups):
            group = prompts[number * size:(number + 1) * size]
            for name in list(sides)[::1 if number % 2 else -1]:  # who goes first alternates
                started_s = time.perf_counter()
                tokens = sides[name](group)
                tok_s[name].append(tokens / (time.perf_counter() - started_s))
            if not args.json:
                print(", ".join(f"{name} {values[-1]:,.0f} output tok/s" for name, values in tok_s.items()), flush=True, file=out)
    medians = {name: statistics.median(values) for name, values in tok_s.items()}
    ratio = round(medians["capture"] / medians["plain"], 3)
    print(json.dumps({"ratio": ratio}) if args.json else f"medians: plain {medians['plain']:,.0f}, capture {medians['capture']:,.0f} output tok/s, ratio {ratio}",
          file=out)


def checked(answer: Answer, prompt_tokens: int, layers: int, hidden_size: int) -> int:
    """Output tokens of an answer whose states the capture stage would take."""
    conversation = Conversation("", "", "", torch.tensor(answer.token_ids), prompt_tokens, answer.finish_reason, answer.states_TLH)
    check_conversation(conversation, layers, hidden_size)
    return len(answer.token_ids) - prompt_tokens


@contextlib.contextmanager
def plain_engines(experiment: Experiment, target: Path) -> Iterator[list[Connection]]:
    """As many engines as capture has, each in a process on the same cores as the capture engine of its number."""
    arguments = engine_arguments(experiment, target, [1], Path("unused"))
    arguments = {name: value for name, value in arguments.items() if name not in CAPTURE_ONLY}
    cores, processes, connections = sorted(os.sched_getaffinity(0)), [], []
    try:
        for own in share(cores, experiment.capture.engines):
            ours, theirs = Pipe()
            environment = cpu_environment({**os.environ, "VLLM_NO_USAGE_STATS": "1"}, own, experiment.target.tensor_parallel)
            with theirs:
                processes.append(subprocess.Popen([sys.executable, __file__, "--worker", str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment,
                                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            ours.send({"engine": arguments, "cores": own})
            connections.append(ours)
        for connection in connections:
            connection.recv()
        yield connections
    finally:
        for connection in connections:
            connection.close()  # its engine ends
        for process in processes:
            process.wait()


def answer_plainly(engines: list[Connection], group: list[list[int]], experiment: Experiment) -> int:
    """Output tokens of one group, shared out to the engines as capture shares it."""
    for number, engine in enumerate(engines):
        engine.send({"prompts": group[number::len(engines)], "max_tokens": experiment.capture.max_tokens})
    return sum(engine.recv() for engine in engines)


def plain_engine(connection: Connection) -> None:
    """One engine: answers what it is sent, and ends when the connection closes."""
    setup = connection.recv()
    os.sched_setaffinity(0, setup["cores"])
    from vllm import LLM, SamplingParams

    engine = LLM(**setup["engine"]).llm_engine
    connection.send(None)
    number = 0
    with contextlib.suppress(EOFError):
        while True:
            work, tokens = connection.recv(), 0
            params = SamplingParams(max_tokens=work["max_tokens"], temperature=0.0, detokenize=False)
            for token_ids in work["prompts"]:
                engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
                number += 1
            while engine.has_unfinished_requests():
                tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
            connection.send(tokens)


if __name__ == "__main__":
    main()
