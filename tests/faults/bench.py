"""What the faults of one campaign share: the reference run, a cluster of three nodes, a server of S3; each started when it is first needed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any
from unittest import mock

from raysd.artifacts import Store
from raysd.backends.s3_home import S3Home
from raysd.experiment.store import S3Section
from tests.faults.ground import MOMENT_S, POLL_S, Attempt, Ground, NotRecovered, Reference, copied_store, small_disk
from tests.ray_nodes import NAMES, Nodes, three_nodes
from tests.s3_server import MOTO_ENVIRONMENT, FaultyProxy, moto_server
from tests.tiny_chain import UNHURRIED, write_experiment

REFERENCE_S = 900
ENGINE = {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}
CHANGES = {
    "capture": {"engines": 1, "max_tokens": 48, "concurrency": 4, "shard_conversations": 6, "kv_cache_bytes": 268435456},
    "train": {"steps": 60, "ttt_steps": 2, "lr": 2e-3, "evaluations": 2, "served_checkpoints": 1, "served_k": 2, "served_tokens": 12, "truncated": "keep"},
    "quantize": {"served_k": 2, "served_tokens": 12},
    "sweep": UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1, 2], "k": [2], "blocks": 3, "requests_per_slot": 2, "workloads": [{"name": "report", "osl": 24}],
              "engine": ENGINE},
}
"""The tiny chain in short: small shards, so that a fault meets several; two arms, since every engine takes its time to start."""


def make_reference(folder: Path) -> Reference:
    """Runs the experiment once, as a user would."""
    folder.mkdir(parents=True)
    spec = write_experiment(folder, **CHANGES)
    attempt = Attempt([sys.executable, "-m", "raysd", "run", str(spec)], folder / "reference.log", {})
    try:
        code = attempt.wait(REFERENCE_S)
    finally:
        attempt.end()
    assert code == 0, attempt.tail()
    return Reference(spec, folder / "runs")


@contextlib.contextmanager
def busy_workers(nodes: Nodes) -> Iterator[None]:
    """Somebody else's jobs hold all of the resource that `Fault.ground_on_nodes` asks for."""
    jobs = {_ask(nodes, "", {"entrypoint": "exec sleep 3600", "entrypoint_resources": {"worker": 1}})["submission_id"] for _ in NAMES[1:]}
    try:
        wait_for_jobs(nodes, jobs, "RUNNING")
        yield
    finally:
        for job in jobs:
            _ask(nodes, f"{job}/stop", {})


def wait_for_jobs(nodes: Nodes, jobs: set[str], *statuses: str) -> None:
    """Returns when each of the jobs has one of Ray's statuses. Raises NotRecovered if that takes too long."""
    deadline = time.monotonic() + MOMENT_S
    while any(job["status"] not in statuses for job in nodes.jobs() if job["submission_id"] in jobs):
        if time.monotonic() > deadline:
            raise NotRecovered(f"the jobs {', '.join(sorted(jobs))} do not become {' or '.join(statuses)}")
        time.sleep(POLL_S)


def _ask(nodes: Nodes, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """What Ray's job server answers."""
    headers = {"Authorization": f"Bearer {nodes.environment['RAY_AUTH_TOKEN']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{nodes.address}/api/jobs/{path}", json.dumps(document).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Bench:
    """`with Bench(reference, scratch) as bench:` all that it started has ended on exit."""

    def __init__(self, reference: Reference, scratch: Path) -> None:
        self.reference, self._scratch = reference, scratch
        self._started = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self._started.close()

    @cached_property
    def nodes(self) -> Nodes:
        """A Ray cluster of three nodes."""
        return self._started.enter_context(three_nodes(self._scratch / "nodes.log"))

    @cached_property
    def s3(self) -> str:
        """The address of a server of S3; its credentials are in this process's environment."""
        self._started.enter_context(mock.patch.dict(os.environ, MOTO_ENVIRONMENT))
        return self._started.enter_context(moto_server(self._scratch / "moto.log"))


class Fault:
    """One fault: its kind and seed decide all about it. `with Fault(...) as fault:` what it started has ended on exit."""

    def __init__(self, bench: Bench, kind: str, seed: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.bench, self.kind, self.seed, self.folder = bench, kind, seed, folder
        self.dice = Random(f"{kind}:{seed}")
        self.hit = ""
        """What was hit, in a few words."""
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()

    def ground(self, *stages: str) -> Ground:
        """A store in a folder, made again by the stages' own scripts."""
        return self._ground(stages, copied_store(self.bench.reference, list(stages), self._store), None, {})

    def ground_of_runs(self, *stages: str) -> Ground:
        """A store in a folder, made again by `raysd run` with a Ray of its own."""
        return self._ground(stages, copied_store(self.bench.reference, list(stages), self._store), [], {})

    def ground_on_nodes(self, *stages: str) -> Ground:
        """A store in a folder, made again by `raysd run` on the cluster, by nodes other than its head."""
        spec = self.bench.reference.at_faults("nodes", hardware={"resources": {stage: {"custom": {"worker": 0.01}} for stage in stages}})
        nodes = self.bench.nodes
        return self._ground(stages, copied_store(self.bench.reference, list(stages), self._store), ["--address", nodes.address], nodes.environment, spec)

    def ground_on_s3(self, *stages: str) -> tuple[Ground, FaultyProxy]:
        """A store on S3 that the attempts reach through a proxy, made again by the stages' own scripts."""
        import boto3

        server = self.bench.s3
        proxy = self._held.enter_context(FaultyProxy(server))
        client, bucket = boto3.session.Session().client("s3", endpoint_url=server), f"{self.kind.replace('_', '-')}-{self.seed}"
        client.create_bucket(Bucket=bucket)
        local = copied_store(self.bench.reference, list(stages), self._store)
        for entry in local.home.list(""):
            client.put_object(Bucket=bucket, Key=entry.key, Body=local.home.get(entry.key))
        section = S3Section(uri=f"s3://{bucket}", endpoint_url=server, addressing_style="path")
        store = Store(S3Home(section, self.folder / "copies"))
        through = section.model_copy(update={"endpoint_url": proxy.endpoint}).text()
        return self._ground(stages, store, None, {"RAYSD_CACHE": str(self.folder / "cache")}, text=through), proxy

    def ground_on_small_disk(self, *stages: str) -> tuple[Ground, Callable[[int | None], None]]:
        """A store on a disk of its own, and what leaves that disk so many free bytes (None: plenty). Raises NotAllowed where that needs more rights."""
        leave = self._held.enter_context(small_disk(self._store))
        return self._ground(stages, copied_store(self.bench.reference, list(stages), self._store), None, {}), leave

    @property
    def _store(self) -> Path:
        return self.folder / "runs"

    def _ground(self, stages: tuple[str, ...], store: Store, route: list[str] | None, environment: dict[str, str], spec: Path | None = None,
                text: str | None = None) -> Ground:
        made = Ground(self.bench.reference, list(stages), self.folder, store, text or str(self._store), route, environment, spec)
        self._held.callback(made.end)
        return made
