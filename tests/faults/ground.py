"""Where a fault happens: a store that holds the reference run but for the stages that are made again, and the attempts at them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from raysd.artifacts import FileEntry, FolderHome, Store
from raysd.artifacts.home import Home
from raysd.experiment import load_experiment
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.stages import Stage

JOBS = Path(__file__).parents[2] / "jobs"
MOMENT_S = 180.0
"""The longest that an attempt may take to come to the moment of its fault."""
END_S = 300.0
"""The longest that an attempt may take to end."""
POLL_S = 0.02
TRIES = 3
"""Runs after a fault, until one ends well."""


class NotRecovered(Exception):
    """Something that raysd promises was not kept; the text says what."""


class NotAllowed(Exception):
    """The fault needs a right that this process lacks; the text says which."""


@dataclass(frozen=True)
class Reference:
    """An experiment that was run without a fault."""

    spec: Path
    store: Path

    def at_faults(self, name: str = "plain", **sections: dict[str, Any]) -> Path:
        """The experiment with some settings, in a file of a name: checkpoints come quickly, so that a fault meets several."""
        document = yaml.safe_load(self.spec.read_text(encoding="utf-8"))
        document["train"]["checkpoint_every_s"] = 0.4
        for section, values in sections.items():
            document[section] = {**document.get(section, {}), **values}
        path = self.spec.with_name(f"faults-{name}.yaml")
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path


class Attempt:
    """A process that a user starts, in a session of its own, with its lines in a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.command = command
        with log.open("w", encoding="utf-8") as lines:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True,
                                            env={**os.environ, **environment})
        self._seen: set[psutil.Process] = set()

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, what: str, ready: Callable[[], Any]) -> Any:
        """What `ready` returns once that is true. Raises NotRecovered if the attempt ends before, or takes too long."""
        deadline = time.monotonic() + MOMENT_S
        while not (found := ready()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise NotRecovered(f"the attempt ended, or hung, before {what}: {self.tail()}")
            time.sleep(POLL_S)
        return found

    def wait_for(self, text: str, times: int = 1) -> None:
        """Returns when the attempt has written a text so often."""
        self.wait_until(f"`{text}` x {times}", lambda: self.text().count(text) >= times)

    def wait(self, within_s: float = END_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise NotRecovered(f"the attempt did not end within {within_s:g} s: {self.tail()}") from None

    def descendants(self) -> list[psutil.Process]:
        """Processes that it started, and those that they started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self._seen if process.is_running()]

    def find(self, part: str) -> list[psutil.Process]:
        """Descendants with a text in their command line."""
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self) -> None:
        """kill -9, to it alone."""
        self.descendants()
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ends whatever of it still runs: gently first, since a run of its own Ray shuts that down."""
        processes = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for process in {*processes, *self.descendants()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        return " | ".join(line for line in self.text().splitlines() if line.strip())[-700:]


class Ground:
    """One fault's own store, and its attempts at the stages that are missing from it."""

    def __init__(self, reference: Reference, stages: list[str], folder: Path, store: Store, store_text: str, route: list[str] | None,
                 environment: dict[str, str], spec: Path | None = None) -> None:
        """route: None for the stages' own scripts; else the arguments of `raysd run` beside the experiment and the store."""
        self.reference, self.names, self.folder, self.store, self.store_text = reference, stages, folder, store, store_text
        self.route, self.environment = route, environment
        self.spec = spec or reference.at_faults()
        self.stages: dict[str, Stage] = {stage.name: stage for stage in stages_of(load_experiment(self.spec))}
        self.attempts: list[Attempt] = []
        self.damaged: set[str] = set()
        """Pieces that a fault damaged: those must be made again."""
        self.resumes: list[int] = []
        """Training steps that the newest whole checkpoint held before each try."""

    @property
    def home(self) -> Home:
        return self.store.home

    def prefix(self, stage: str) -> str:
        return self.stages[stage].key.prefix

    def start(self, stage: str | None = None, command: list[str] | None = None) -> Attempt:
        """Starts an attempt as the route says. stage: the script's, by default the first of the missing ones; command: another program."""
        where = [str(self.spec), "--store", self.store_text]
        if command is None and self.route is None:
            command = [str(JOBS / f"{stage or self.names[0]}.py"), "--experiment", *where]
        elif command is None:
            command = ["-m", "raysd", "run", *where, *self.route]
        attempt = Attempt([sys.executable, *command], self.folder / f"attempt-{len(self.attempts)}.log", self.environment)
        self.attempts.append(attempt)
        return attempt

    def raysd(self, verb: str, *arguments: str) -> Attempt:
        """Another command of raysd's about this experiment and store, begun and ended."""
        attempt = self.start(command=["-m", "raysd", verb, str(self.spec), "--store", self.store_text, *arguments])
        attempt.wait()
        return attempt

    def wait_for_kept(self, attempt: Attempt, stage: str, part: str, times: int = 1) -> None:
        """Returns when so many pieces with a text in their name have been kept, told by the attempt's or the job's lines."""
        attempt.wait_until(f"`kept {part}` x {times}", lambda: sum(n for name, n in self.kept(stage).items() if name.startswith(part)) >= times)

    def kept(self, stage: str) -> Counter[str]:
        """How often each piece was kept, over all attempts."""
        texts = [attempt.text() for attempt in self.attempts] if self.route is None else self.job_logs(stage)
        return Counter(name for text in texts for name in re.findall(r"^kept (\S+)", text, re.MULTILINE))

    def job_logs(self, stage: str) -> list[str]:
        return [self.store.read_log(self.stages[stage].key, number) for number in self.store.logs(self.stages[stage].key)]

    def whole_pieces(self, stage: str) -> dict[str, str]:
        """Name to the newest key of each piece that is whole, now that nobody works on the stage."""
        work = f"{self.prefix(stage)}work/"
        keys = sorted(entry.key.removesuffix(".sum") for entry in self.home.list(work) if entry.key.endswith(".sum"))  # a lease's number comes first
        return {key.removeprefix(work).partition("/")[2]: key for key in keys if self.is_whole(key)}

    def is_whole(self, key: str) -> bool:
        """Whether a piece is what its checksum says."""
        content, entry = self.home.get(key), FileEntry.model_validate_json(self.home.get(f"{key}.sum"))
        return content is not None and (len(content), hashlib.sha256(content).hexdigest()) == (entry.size_bytes, entry.sha256)

    def leases(self, stage: str) -> list[int]:
        """Numbers of the stage's leases."""
        return [int(match[1]) for entry in self.home.list(f"{self.prefix(stage)}lease-") if (match := re.search(r"lease-(\d+)\.json$", entry.key))]

    def is_running(self, stage: str) -> bool:
        """Whether somebody works on the stage."""
        seen = self.store.lease(self.stages[stage].key)
        return seen is not None and seen.state() == "running"

    def finish(self) -> None:
        """Runs again, as a user would, until the stages are there; raises NotRecovered if they do not come, or if what was whole is made again."""
        for stage in self.names if self.route is None else [None]:
            for tries in range(TRIES):
                # What somebody still works on changes while it is looked at.
                before = {name: (self.whole_pieces(name), self.kept(name)) for name in self.names if not self.is_running(name)}
                self._note_checkpoint(before)
                attempt = self.start(stage)
                code = attempt.wait()
                for name, (whole, kept) in before.items():
                    repeated = [piece for piece in whole if not piece.startswith("checkpoint") and self.kept(name)[piece] > kept[piece]]
                    if repeated:
                        raise NotRecovered(f"{name}: made again though whole: {', '.join(repeated)}")
                if code == 0:
                    break
                if tries == TRIES - 1:
                    raise NotRecovered(f"still exit code {code} after {TRIES} runs: {attempt.tail()}")

    def _note_checkpoint(self, before: dict[str, tuple[dict[str, str], Counter[str]]]) -> None:
        import torch

        whole, _ = before.get("train", ({}, None))
        paths = [self.home.local(key) for name, key in whole.items() if name.startswith("checkpoint")]
        if paths and all(path.exists() for path in paths):
            documents = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
            newest = max(documents, key=lambda document: document["written"])
            self.resumes.append(newest["training"]["steps"])

    def end(self) -> None:
        for attempt in self.attempts:
            attempt.end()


def copied_store(reference: Reference, stages: list[str], folder: Path) -> Store:
    """A copy of the reference's store without some stages."""
    shutil.copytree(reference.store, folder, dirs_exist_ok=True,
                    ignore=lambda path, names: stages if Path(path).parent == reference.store else [])
    return Store(FolderHome(folder))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int | None], None]]:
    """A file system of its own at a folder; yields a function that leaves it so many free bytes (None: plenty). Raises NotAllowed if it cannot be mounted."""
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2G", "raysd-faults", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise NotAllowed(f"mounting a small disk: {done.stderr.strip()}")

    def leave(free_bytes: int | None) -> None:
        usage = shutil.disk_usage(folder)
        size = "2G" if free_bytes is None else str(usage.used + free_bytes)
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    try:
        yield leave
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
