"""The engines of one node: started when they are needed, held up together or one after the other, ended with the sweep."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from raysd.errors import EngineError
from raysd.sweep.cells import Engine, engine_name
from raysd.sweep.engine import EngineSpec, Launch, Server

POLL_S = 0.25
STARTS = 2
"""How often in a row an engine may fail to start, before it counts as one that cannot be had."""


class Engines:
    """Which engines are up. To be closed, also after an error: `with contextlib.closing(engines):`; by another thread than the one that works with them, if need be."""

    def __init__(self, specs: Mapping[Engine, EngineSpec], together: bool, launch: Launch, logs: Path, warm_up: Callable[[Engine, Server], None],
                 wait_for_memory: Callable[[], None] = lambda: None) -> None:
        """specs: of all engines, the baseline's first. warm_up: called with each engine that has come up. wait_for_memory: called before engines start while none is
        up; it returns when nobody holds their devices' memory, or raises EngineError."""
        self._specs, self._together, self._launch, self._logs, self._warm_up, self._wait_for_memory = specs, together, launch, logs, warm_up, wait_for_memory
        self._up: dict[Engine, Server] = {}
        self._closed, self._changing = False, threading.Lock()
        self._starts: Counter[Engine] = Counter()
        self._failures: dict[Engine, list[EngineError]] = {engine: [] for engine in specs}
        self.start_s: dict[Engine, float] = {}
        """How long the first start of each took."""
        self.commands: dict[Engine, list[str]] = {}

    @property
    def up(self) -> dict[Engine, Server]:
        """Those that are up."""
        return dict(self._up)

    def get(self, engine: Engine) -> Server:
        """The server of an engine: up, and warmed up. Others that are to be up with it are started with it.

        Raises EngineError, with the telling lines of its log, if it cannot be had. After two starts in a row that failed, no third is tried.
        """
        if starting := self.to_start(engine):
            self._start(starting)
        if engine not in self._up:
            raise self._failures[engine][-1]
        return self._up[engine]

    def to_start(self, engine: Engine) -> list[Engine]:
        """What `get` would start: nothing if the engine is up, or cannot be had."""
        if engine in self._up or engine in self.given_up():
            return []
        return [each for each in self._specs if each not in self._up and each not in self.given_up()] if self._together else [engine]

    def put_away(self, engine: Engine) -> None:
        """Ends an engine that has died or does not answer any more; the next `get` starts it again."""
        if (server := self._up.pop(engine, None)) is not None:
            server.stop()

    def given_up(self) -> dict[Engine, EngineError]:
        """The engines that cannot be had, with the last failure of each."""
        return {engine: failures[-1] for engine, failures in self._failures.items() if len(failures) >= STARTS}

    def refuse(self, engine: Engine, error: EngineError) -> None:
        """An engine that is up must not be measured: it counts as one that cannot be had."""
        self.put_away(engine)
        self._failures[engine] = [error] * STARTS

    def close(self) -> None:
        """Ends all of them, and has nobody start another."""
        with self._changing:
            self._closed = True
        self._end_all()

    def _end_all(self) -> None:
        with self._changing:
            up, self._up = self._up, {}
        with contextlib.ExitStack() as stops:  # one that does not end keeps no other from being ended
            for server in up.values():
                stops.callback(server.stop)

    def _start(self, wanted: list[Engine]) -> None:
        """Side by side: most of a start is one thread importing and compiling."""
        try:
            if not self._together:
                self._end_all()
            if not self._up:
                self._wait_for_memory()
        except EngineError as err:
            for engine in wanted:
                self._failures[engine].append(err)
            return
        starting = {}
        try:
            for engine in wanted:
                self._starts[engine] += 1
                again = f"-start{self._starts[engine]}" if self._starts[engine] > 1 else ""
                try:
                    starting[engine] = self._launch(self._specs[engine], self._logs / f"{engine_name(engine)}{again}.log")
                except EngineError as err:
                    self._failures[engine].append(err)
                    continue
                self.commands[engine] = starting[engine].command
            while starting:
                for engine, server in list(starting.items()):
                    try:
                        with self._changing:
                            if self._closed:
                                raise EngineError(what="the sweep is at its end", where=server.log_path, fix="run again to go on")
                            if server.is_ready():
                                self._up[engine] = starting.pop(engine)
                                self.start_s.setdefault(engine, server.start_s)
                    except EngineError as err:
                        self._failures[engine].append(err)
                        starting.pop(engine).stop()
                time.sleep(POLL_S if starting else 0)
        finally:
            for server in starting.values():
                server.stop()
        for engine in wanted:
            if engine in self._up:
                try:
                    self._warm_up(engine, self._up[engine])
                    self._failures[engine].clear()
                except EngineError as err:
                    self._failures[engine].append(err)
                    self.put_away(engine)
