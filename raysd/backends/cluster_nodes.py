"""Every node of a Ray cluster looked at for the doctor: a job whose driver runs a task on each."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import Any

from raysd.backends.ray_driver import last_line
from raysd.backends.ray_jobs import CALL_TIMEOUT_S, PACKAGE, POLL_S, SUBMIT_TIMEOUT_S, explained, job_submission_client, within
from raysd.checks.node_facts import NodeFacts, look_at_this_node
from raysd.errors import TryAgainError

MARK = "RAYSD-NODES "
"""How the line of the job's log begins that holds what was found."""
NODE_TIMEOUT_S = 120.0
"""For one node: its worker has to start, and to unpack the code."""
JOB_TIMEOUT_S = 600.0


def look_at_nodes(address: str) -> list[NodeFacts]:
    """Every node of the cluster whose job server is at an address, or `auto`. Raises RaysdError if it does not answer, or a node does not."""
    client = job_submission_client(address)
    python = f'"$(command -v {shlex.quote(sys.executable)} || command -v python)"'  # as entrypoint in ray_jobs.py has it
    with explained("looking at the nodes"):
        job = within(SUBMIT_TIMEOUT_S, client.submit_job, entrypoint=f"exec {python} -m {__name__}", runtime_env={"py_modules": [str(PACKAGE)]})
        give_up = time.monotonic() + JOB_TIMEOUT_S
        try:
            while not (status := within(CALL_TIMEOUT_S, client.get_job_status, job)).is_terminal():
                if time.monotonic() > give_up:
                    raise TryAgainError(what=f"the nodes were not looked at within {JOB_TIMEOUT_S:g} s", where=f"job {job}", fix="look at `ray status` and at the job's log")
                time.sleep(POLL_S / 4)
        except BaseException:
            within(CALL_TIMEOUT_S, client.stop_job, job)
            raise
        log = within(CALL_TIMEOUT_S, client.get_job_logs, job)
    told = next((line.removeprefix(MARK) for line in reversed(log.splitlines()) if line.startswith(MARK)), None)
    if told is None:
        raise TryAgainError(what=f"the nodes could not be looked at: {last_line(log) or status.value}", where=f"job {job}", fix="read the job's log: `ray job logs`")
    answer = json.loads(told)
    if "error" in answer:
        raise TryAgainError(what=answer["error"], where=f"job {job}", fix="look at `ray status`, and whether the node has the Python that Ray was started with")
    return [NodeFacts.from_json(node) for node in answer["nodes"]]


def main() -> int:
    """The job's driver: prints one line with what all nodes are like."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(configure_logging=False, log_to_driver=False)
    task = ray.remote(num_cpus=0, max_retries=1)(_look)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(node["Resources"].get("GPU", 0.0)) for node in nodes]
    found: list[dict[str, Any]] = []
    for node, reference in zip(nodes, asked, strict=True):
        try:
            found.append(ray.get(reference, timeout=NODE_TIMEOUT_S))
        except ray.exceptions.RayError as err:  # a timeout, too
            print(MARK + json.dumps({"error": f"the node {node['NodeManagerAddress']} could not be looked at: {last_line(err)}"}), flush=True)
            return 1
    print(MARK + json.dumps({"nodes": found}), flush=True)
    return 0


def _look(gpus: float) -> dict[str, Any]:
    return look_at_this_node().as_json() | {"ray_gpus": gpus}


if __name__ == "__main__":
    sys.exit(main())
