"""A Ray cluster of three nodes on this machine, each with a raylet of its own, in a process of their own: `with three_nodes(log) as nodes:`.

The process shuts the cluster down when its standard input closes, which nobody but its owner holds; a line there asks for one more node of a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

NAMES = ("a", "b", "c")
"""The head is `a`. Node X declares the resource `node_X`, and every one but the head the resource `worker`."""
SHUTDOWN_S = 60
PATIENCE_S = 480


class Nodes:
    """The running cluster."""

    def __init__(self, process: subprocess.Popen, environment: dict[str, str]) -> None:
        self._process = process
        self.environment = environment
        """What a process needs to be let in."""
        told = self._read()
        self.address: str = told["address"]
        """Of the job server."""
        self.ids: dict[str, str] = told["ids"]
        """Node's name to Ray's id."""
        self.raylets: dict[str, int] = told["raylets"]
        """Node's name to its raylet's process id."""

    def add(self, name: str) -> None:
        """Starts a node in place of one of that name that has died."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        told = self._read()
        self.ids, self.raylets = told["ids"], told["raylets"]

    def jobs(self) -> list[dict[str, Any]]:
        """Ray's job table."""
        return self.call_jobs("GET")

    def call_jobs(self, method: str, path: str = "", content: dict[str, Any] | None = None) -> Any:
        """The job server's answer. Over plain HTTP: Ray's client takes a token only if it was there when the process first imported Ray."""
        request = urllib.request.Request(f"{self.address}/api/jobs/{path}", method=method, data=json.dumps(content or {}).encode() if method == "POST" else None,
                                         headers={"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, f"the process of the cluster ended with exit code {self._process.wait()}"
        return json.loads(line)


class Job:
    """A job with one of the drivers in tests/backends, whose folder holds what comes of it."""

    def __init__(self, nodes: Nodes, module: str, folder: Path, environment: str = "") -> None:
        self.nodes, self.folder, self._module = nodes, folder, module
        entrypoint = f"cd {Path(__file__).parents[1]} && exec env {environment} {sys.executable} -m {module} {folder}"
        self.id = nodes.call_jobs("POST", "", {"entrypoint": entrypoint})["submission_id"]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.ended():
            self.stop()
            self.wait()

    def ended(self) -> bool:
        return self.nodes.call_jobs("GET", self.id)["status"] in ("SUCCEEDED", "FAILED", "STOPPED")

    def stop(self) -> None:
        """SIGTERM."""
        self.nodes.call_jobs("POST", f"{self.id}/stop")

    def log(self) -> str:
        return self.nodes.call_jobs("GET", f"{self.id}/logs")["logs"]

    def wait(self, until: Callable[[], Any] | None = None) -> Any:
        """Returns when the job has ended, or something is there earlier; fails if the job ends before that."""
        give_up = time.monotonic() + PATIENCE_S
        while not (found := (until or self.ended)()):
            assert time.monotonic() < give_up and (until is None or not self.ended()), self.log()[-6000:]
            time.sleep(0.2)
        return found

    def result(self) -> dict[str, Any]:
        """What the stage came to."""
        self.wait()
        path = self.folder / "result.json"
        assert path.is_file(), self.log()[-6000:]
        return json.loads(path.read_text())

    def pid(self) -> int:
        """Of the driver."""
        return next(process.pid for process in psutil.process_iter(["cmdline"])
                    if process.info["cmdline"] and process.info["cmdline"][1:] == ["-m", self._module, str(self.folder)])

    def processes(self, named: str) -> list[psutil.Process]:
        """Those below the raylets whose command line holds a word."""
        found = []
        for raylet in self.nodes.raylets.values():
            for process in psutil.Process(raylet).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended
                    found += [process] if named in " ".join(process.cmdline()) else []
        return found


@contextlib.contextmanager
def three_nodes(log: Path) -> Iterator[Nodes]:
    """All of the cluster's ports are on loopback, and it asks for a token. log: where Ray's own lines go."""
    folder = tempfile.mkdtemp(prefix="rn-")  # short: the paths of Ray's sockets have a limit
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    settings = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "AUTOSCALER_METRIC_PORT": "0",
                "DASHBOARD_METRIC_PORT": "0"}  # as raysd/backends/local_ray.py says
    with log.open("w") as lines:
        process = subprocess.Popen([sys.executable, "-m", "tests.ray_nodes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True,
                                   env={**os.environ, **settings, **token}, start_new_session=True, cwd=Path(__file__).parents[1])
    try:
        yield Nodes(process, token)
    finally:
        process.stdin.close()
        try:
            process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # Ray writes to standard output, too
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": "127.0.0.1", "num_cpus": 2, "object_store_memory": 100 * 2**20, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 0,
                                                            "resources": {"node_a": 1}})
    nodes = {"a": cluster.head_node}
    for name in NAMES[1:]:
        nodes[name] = cluster.add_node(**common, resources={f"node_{name}": 1, "worker": 1})
    while True:
        told = {"address": f"http://{cluster.webui_url}", "ids": {name: node.node_id for name, node in nodes.items()},
                "raylets": {name: node.all_processes["raylet"][0].process.pid for name, node in nodes.items()}}
        print(json.dumps(told), file=answers, flush=True)
        name = sys.stdin.readline().strip()
        if not name:
            break
        cluster.remove_node(nodes[name], allow_graceful=False)
        nodes[name] = cluster.add_node(**common, resources={f"node_{name}": 1, "worker": 1})
    cluster.shutdown()


if __name__ == "__main__":
    main()
