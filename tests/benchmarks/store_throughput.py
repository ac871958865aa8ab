"""How fast a store in a folder publishes a large artifact, against `cp`, `sync` and `sha256sum`.

Run: python tests/benchmarks/store_throughput.py [--gb 2] [--rounds 5] [--folder DIR] [--json]

Both sides start from the same synced file and end with its content durable under a new name, and its SHA-256 known. They alternate in
one run, with a `sync` before each; the ratio is of the medians.

  raysd          the stage writes its file (`cp` into its scratch folder), then what every stage does: describe_files, which hashes, and
                 publish, which syncs the file, moves it, syncs its folder, and writes the record, all under a lease.
  cp+sha256sum   `cp`, `sync FILE`, `sha256sum FILE`.

One file, the harder case: of several files raysd hashes some at once. `open`, which hashes what it reads, is timed as well, against
`sha256sum` alone. coreutils' sha256sum may be built without OpenSSL, whose SHA-256 raysd uses: then much of the ratio is that.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raysd.artifacts import ArtifactKey, FolderHome, Store
from tests.records import make_record

CHUNK_BYTES = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the artifact, in 10^9 bytes (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side runs (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--json", action="store_true", help='print {"ratio": ...} alone')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = write_source(Path(folder) / "source", int(args.gb * 1e9))
        seconds: dict[str, list[float]] = {"raysd": [], "cp+sha256sum": [], "open": [], "sha256sum": []}
        for number in range(args.rounds):
            sides = [("raysd", publish_and_open), ("cp+sha256sum", copy_and_hash)]
            for name, side in sides if number % 2 == 0 else reversed(sides):
                os.sync()
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    write_s, read_s = side(source, Path(scratch))
                seconds[name].append(write_s)
                seconds["open" if name == "raysd" else "sha256sum"].append(read_s)
    mb_s = {name: args.gb * 1e3 / statistics.median(each) for name, each in seconds.items()}
    ratio = mb_s["raysd"] / mb_s["cp+sha256sum"]
    if args.json:
        print(json.dumps({"ratio": round(ratio, 3)}))
        return
    write = ", ".join(f"{name} {mb_s[name]:,.0f} MB/s" for name in ("raysd", "cp+sha256sum"))
    print(f"write {args.gb:g} GB, {args.rounds} rounds: {write}, ratio {ratio:.2f}")
    print(f"read: open {mb_s['open']:,.0f} MB/s, sha256sum {mb_s['sha256sum']:,.0f} MB/s, ratio {mb_s['open'] / mb_s['sha256sum']:.2f}")


def write_source(path: Path, size_bytes: int) -> Path:
    with path.open("wb") as file:
        for start in range(0, size_bytes, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, size_bytes - start)))
    return path


def publish_and_open(source: Path, folder: Path) -> tuple[float, float]:
    """Seconds to write and publish the file, and to open the artifact."""
    store, key = Store(FolderHome(folder / "store")), ArtifactKey("bench", "train", "a" * 32)
    started_s = time.perf_counter()
    with store.work_on(key, {}) as work:
        out = work.clear()
        subprocess.run(["cp", source, out / "draft.bin"], check=True)
        record = make_record(key, out, folder=work.folder)
        work.publish(out, record)
    published_s = time.perf_counter()
    store.open(key)
    return published_s - started_s, time.perf_counter() - published_s


def copy_and_hash(source: Path, folder: Path) -> tuple[float, float]:
    """Seconds to copy, sync and hash the file, and to hash it once more."""
    target = folder / "draft.bin"
    started_s = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    subprocess.run(["sync", target], check=True)
    subprocess.run(["sha256sum", target], check=True, stdout=subprocess.DEVNULL)
    copied_s = time.perf_counter()
    subprocess.run(["sha256sum", target], check=True, stdout=subprocess.DEVNULL)
    return copied_s - started_s, time.perf_counter() - copied_s


if __name__ == "__main__":
    main()
