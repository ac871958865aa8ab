"""How long `raysd run` takes when all artifacts exist: in a folder, and on S3 among 1,000 other artifacts of the same experiment.

Run: python tests/benchmarks/cached_run.py [--json]. The S3 is a server of moto's in a process of its own, on this machine; RAYSD_TEST_S3_ENDPOINT and
RAYSD_TEST_S3_BUCKET name another. Each time is the whole command's, imports included, as a median; with --json the only line is
{"local_s": ..., "s3_1000_artifacts_s": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts import ArtifactKey, Store
from raysd.artifacts.record import encode_record
from raysd.backends.stores import open_store
from raysd.experiment import load_experiment
from raysd.pipeline.preflight import stages_of
from tests import s3_server
from tests.records import make_record, publish_files, write_files

EXPERIMENT = Path(__file__).resolve().parents[2] / "jobs" / "smollm2-cpu.yaml"
ARTIFACTS = 1000
ROUNDS = 5
FILES = {"draft/config.json": b"{}", "draft/model.safetensors": b"weights", "curve.parquet": b"curve"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        local = open_store(str(Path(folder) / "runs"))
        publish_chain(local)
        local_s = measure(local, folder)
        if s3_server.ENDPOINT:
            s3_s = measure_s3(s3_server.ENDPOINT, folder)
        else:
            os.environ.update(s3_server.MOTO_ENVIRONMENT)
            with s3_server.moto_server(Path(folder) / "moto.log") as endpoint:
                s3_s = measure_s3(endpoint, folder)
    if args.json:
        print(json.dumps({"local_s": round(local_s, 3), "s3_1000_artifacts_s": round(s3_s, 3)}))
    else:
        print(f"all artifacts found, median of {ROUNDS}: {local_s:.2f} s in a folder, {s3_s:.2f} s on S3 among {ARTIFACTS:,} artifacts")


def measure_s3(endpoint: str, folder: str) -> float:
    """Seconds of a run on a store of that server, with other artifacts around."""
    client = s3_server.client_of(endpoint)
    bucket = os.environ["RAYSD_TEST_S3_BUCKET"] if s3_server.ENDPOINT else f"raysd-{uuid.uuid4().hex}"
    if not s3_server.ENDPOINT:
        client.create_bucket(Bucket=bucket)
    store = open_store(f"s3://{bucket}/cached-{uuid.uuid4().hex}?endpoint_url={endpoint}&addressing_style=path")
    try:
        publish_chain(store)
        publish_others(store, Path(folder) / "others")
        return measure(store, folder)
    finally:
        store.home.delete([entry.key for entry in store.home.list("")])


def publish_chain(store: Store) -> None:
    """An artifact for each stage of the experiment."""
    for stage in stages_of(load_experiment(EXPERIMENT)):
        publish_files(store, stage.key, FILES, identity=stage.identity)


def publish_others(store: Store, folder: Path) -> None:
    """Artifacts of other fingerprints, spread over the same stages; file by file, since a thousand leases would only cost time."""
    write_files(folder, FILES)
    stages = stages_of(load_experiment(EXPERIMENT))
    record = make_record(stages[0].key, folder)

    def publish(number: int) -> None:
        stage = stages[number % len(stages)]
        key = ArtifactKey(stage.experiment, stage.name, f"{number:032x}")
        for name, content in FILES.items():
            store.home.put(f"{key.prefix}{record.folder}/{name}", content)
        own = record.model_copy(update={"stage": key.stage, "fingerprint": key.fingerprint, "identity": stage.identity})
        store.home.put(f"{key.prefix}record.json", encode_record(own))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(publish, range(ARTIFACTS)))


def measure(store: Store, folder: str) -> float:
    """Median seconds of the command. Raises CalledProcessError if it fails, AssertionError if it did not find everything."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "raysd", "run", str(EXPERIMENT), "--store", store.uri, "--json"], check=True, capture_output=True,
                              env={**os.environ, "RAYSD_CACHE": f"{folder}/cache"})
        seconds.append(time.perf_counter() - started)
        assert {entry["state"] for entry in json.loads(done.stdout)["stages"]} == {"cached"}
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
