"""One vLLM engine for capture, in a process of its own: `python -m raysd.backends.capture_worker FD`, started by vllm_capture.py.

FD is a multiprocessing connection. In come the engine's arguments, then groups of requests, as often as there are any; out go None when the engine is
ready, then a tuple for each answer, or a string that says what failed. When its standard input closes, which nobody but raysd holds, it ends with its
whole process group.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from raysd.backends.keeper import end_group_with_owner

STATES_TIMEOUT_S = 120
"""Longest wait for the file of a request that has ended; it is written in the engine's next step."""
POLL_S = 0.01


def main(connection: Connection) -> int:
    threading.Thread(target=end_group_with_owner, args=(threading.Event(),), daemon=True).start()
    setup = connection.recv()
    os.sched_setaffinity(0, setup["cores"])  # before torch starts its threads
    try:
        from vllm import LLM

        llm = LLM(**setup["engine"])
        llm.collective_rpc("sample_plainly")
        engine = llm.llm_engine
    except Exception as err:  # vLLM raises whatever its engine died of
        connection.send(f"vLLM did not start for capture: {err}")
        raise
    connection.send(None)
    try:
        while (work := received(connection)) is not None:
            for group in work["groups"]:
                for answer in answers(engine, group, work["concurrency"], work["sampling"]):
                    connection.send(answer)
    except Exception as err:
        connection.send(f"vLLM failed while it answered: {err}")
        raise
    return 0


def received(connection: Connection) -> dict[str, Any] | None:
    """What raysd asks for next; None if it has gone."""
    try:
        return connection.recv()
    except EOFError:
        return None


def answers(engine: Any, requests: list[tuple[int, list[int], int]], concurrency: int, sampling: dict[str, Any]) -> Iterator[tuple[int, list[int], str, str]]:
    """Index, tokens of prompt and answer, finish reason and file of states of each request (index, prompt, seed), as they finish.

    Requests go in as others leave, so that the order of work follows theirs. Raises TimeoutError if a file does not come.
    """
    from vllm import SamplingParams

    in_this_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    queue, in_flight, finished, last = iter(requests), 0, [], time.monotonic()
    while True:
        while in_flight < concurrency and (entry := next(queue, None)) is not None:
            index, token_ids, seed = entry
            params = SamplingParams(**sampling, seed=seed, detokenize=False, extra_args={"kv_transfer_params": {"include_output_tokens": True}})
            engine.add_request(str(index), {"prompt_token_ids": token_ids}, params)
            in_flight += 1
        if in_flight or in_this_process:  # which writes the last files in a step without a request
            for output in engine.step():
                if output.finished:
                    in_flight, last = in_flight - 1, time.monotonic()
                    finished.append(output)
        else:
            time.sleep(POLL_S)
        while finished and os.path.exists(finished[0].kv_transfer_params["hidden_states_path"]):
            output = finished.pop(0)
            completion = output.outputs[0]
            yield (int(output.request_id), [*output.prompt_token_ids, *completion.token_ids], completion.finish_reason,
                   output.kv_transfer_params["hidden_states_path"])
            last = time.monotonic()  # whoever takes the answers may be slow, and the engine is not to blame
        if not in_flight and not finished:
            return
        if not in_flight and time.monotonic() - last > STATES_TIMEOUT_S:
            raise TimeoutError(f"no hidden states of request {finished[0].request_id} within {STATES_TIMEOUT_S} s")


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
