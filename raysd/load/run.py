"""Puts a load on a server, and says what came of every request and how well the client kept up.

One thread on uvloop: while requests are in flight it stamps and keeps what arrives, and nothing else. What arrived is parsed when all has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raysd.errors import ExperimentError
from raysd.experiment.sweep import REQUEST_LIMIT_S, SILENCE_LIMIT_S
from raysd.load.address import Address
from raysd.load.arrivals import Load, Part
from raysd.load.connection import Connection, Response, UnheardError, connect, reason
from raysd.load.percentiles import percentile
from raysd.load.requests import Request, Result
from raysd.load.stream import MalformedStreamError, parse_stream
from raysd.load.tally import Tally

LAG_EVERY_S = 0.02
WATCH_EVERY_S = 0.5
STALE_S = 1.0
"""A connection that was idle for so long may be one that its server is about to end."""

SHOWN_CHARACTERS = 300
"""Of what a server says that is no answer."""


@dataclass(frozen=True)
class Limits:
    """What keeps a load from hanging."""

    request_s: float = REQUEST_LIMIT_S
    """The longest that one request may take."""
    silence_s: float | None = None
    """The longest that a server may send no byte while a request is in flight; None: SILENCE_LIMIT_S, or request_s where that is less."""
    connect_s: float = 10.0

    def __post_init__(self) -> None:
        for name, flag in (("request_s", "--request-limit-s"), ("silence_s", "--silence-limit-s")):
            if (limit_s := getattr(self, name)) is not None and not 0 < limit_s < math.inf:
                raise ExperimentError(what=f"a limit of {limit_s} s", where=flag, fix="use more than 0")
        if self.silence_s is not None and self.silence_s > self.request_s:
            raise ExperimentError(what=f"a limit of {self.silence_s:g} s has no effect above that of a request, {self.request_s:g} s", where="--silence-limit-s",
                                  fix=f"use at most {self.request_s:g}, or raise --request-limit-s")

    @property
    def silent_s(self) -> float:
        """The limit of silence that holds."""
        return min(SILENCE_LIMIT_S, self.request_s) if self.silence_s is None else self.silence_s


@dataclass(frozen=True)
class ClientHealth:
    """How well the client kept up: where it did not, the numbers are its own and not the server's."""

    cpu_s: float
    """Of the client's thread, parsing included."""
    elapsed_s: float
    """Of its event loop."""
    chunks: int
    loop_lag_ms_p99: float
    """By how much a timer of the event loop was late."""
    dispatch_delay_ms_p99: float
    """By how much requests were sent later than intended."""

    @property
    def cpu_us_per_chunk(self) -> float | None:
        return 1e6 * self.cpu_s / self.chunks if self.chunks else None


@dataclass(frozen=True)
class LoadRun:
    """Results are in the order of the requests."""

    results: list[Result]
    health: ClientHealth


RunLoad = Callable[[Address, str, Sequence[Request], Load, Limits, bool], LoadRun]
"""Something that does as run_load does: in this process, in another one, in several."""


def run_load(address: Address, model: str, requests: Sequence[Request], load: Load | Part, limits: Limits = Limits(), plain: bool = False, begin_ns: int | None = None,
             tally: Tally | None = None) -> LoadRun:
    """Sends all requests as the load says, and returns when each has ended.

    A request that is refused, cut off, garbled or too slow has its `error` set, and the others go on. plain: as Request.body has it. begin_ns: the `perf_counter_ns`
    that the load's times count from; None: when all is ready. tally: is told how far the load is.
    """
    import uvloop

    bodies = [request.body(model, plain) for request in requests]
    client = _Client(address, [request.path for request in requests], bodies, load, limits, tally or Tally())
    with _undisturbed():
        cpu_s = time.thread_time()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lags_ms = runner.run(client.run(begin_ns))
        elapsed_s = (time.perf_counter_ns() - client.begun_ns) / 1e9
        results = [_result(request, answer, address) for request, answer in zip(requests, client.answers, strict=True)]
        cpu_s = time.thread_time() - cpu_s
    delays_ms = [(result.dispatched_ns - result.intended_ns) / 1e6 for result in results]
    return LoadRun(results, ClientHealth(cpu_s, elapsed_s, sum(len(result.chunk_ns) for result in results), percentile(lags_ms, 99) if lags_ms else 0.0,
                                         percentile(delays_ms, 99) if delays_ms else 0.0))


@dataclass
class _Answer:
    intended_ns: int
    sent_ns: int
    ended_ns: int
    connect_ms: float | None = None
    response: Response | None = None
    error: str | None = None


class _Client:
    def __init__(self, address: Address, paths: Sequence[str], bodies: Sequence[bytes], load: Load | Part, limits: Limits, tally: Tally) -> None:
        self._address, self._tls, self._paths, self._bodies, self._load, self._limits, self._tally = address, address.tls_context(), paths, bodies, load, limits, tally
        self._in_flight: dict[Connection, int] = {}
        """Connections that wait for an answer, and since when."""
        self._too_slow: dict[Connection, str] = {}
        self._idle: list[Connection] = []
        self._to_begin: set[asyncio.Task[None]] = set()
        """Slots of a closed loop that wait for their moment on the ramp."""
        self.answers: list[_Answer | None] = [None] * len(bodies)
        self.begun_ns = 0
        tally.requests += len(bodies)

    async def run(self, begin_ns: int | None) -> list[float]:
        """Loop lags, in ms."""
        self.begun_ns = begun_ns = time.perf_counter_ns() if begin_ns is None else begin_ns
        await _until(begun_ns)
        lag, watcher = _LagTimer(), asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._load.concurrency is not None:
                    waiting = iter(range(len(self._bodies)))
                    for slot in range(min(self._load.concurrency, len(self._bodies))):
                        tasks.create_task(self._slot(begun_ns + int(1e9 * self._load.start_s(slot)), waiting))
                else:
                    for index, at_s in enumerate(self._load.times_s(len(self._bodies))):
                        intended_ns = begun_ns + int(1e9 * at_s)
                        await _until(intended_ns)
                        tasks.create_task(self._ask(index, intended_ns))
        finally:
            lag.stop()
            watcher.cancel()
            for connection in self._idle:
                connection.close()
        return lag.lags_ms

    async def _slot(self, intended_ns: int, waiting: Iterator[int]) -> None:
        """One of those in flight: it takes the next request as soon as its last has ended. Where none is left, no other slot needs to begin."""
        self._to_begin.add(slot := asyncio.current_task())
        await _until(intended_ns)
        self._to_begin.discard(slot)
        for index in waiting:
            intended_ns = (await self._ask(index, intended_ns)).ended_ns
        while self._to_begin:
            self._to_begin.pop().cancel()

    async def _ask(self, index: int, intended_ns: int) -> _Answer:
        answer = self.answers[index] = _Answer(intended_ns, intended_ns, intended_ns)
        self._tally.in_flight += 1
        if await self._try(answer, index):
            await self._try(answer, index, fresh=True)
        self._tally.in_flight -= 1
        self._tally.ended += 1
        self._tally.failed += answer.error is not None or answer.response.status != 200
        return answer

    async def _try(self, answer: _Answer, index: int, fresh: bool = False) -> bool:
        """Whether to ask again, on a new connection: a server may end an idle one at the moment at which it is used again, having heard nothing."""
        connection, stale, answer.error = None, False, None
        try:
            while self._idle and not fresh and (connection is None or connection.closed):
                connection = self._idle.pop()
            if connection is None or connection.closed:
                begun_ns = time.perf_counter_ns()
                connection = await connect(self._address, self._tls, self._limits.connect_s)
                answer.connect_ms = (time.perf_counter_ns() - begun_ns) / 1e6
            else:
                stale = time.perf_counter_ns() - connection.now_ns > 1e9 * STALE_S
            answer.sent_ns, ended = connection.send(self._paths[index], self._bodies[index])
            self._in_flight[connection] = answer.sent_ns
            answer.response = await ended
            answer.ended_ns = answer.response.ended_ns
        except TimeoutError:
            answer.error = f"no connection within {self._limits.connect_s:g} s"
        except OSError as err:  # ConnectionError is one
            too_slow = self._too_slow.pop(connection, None)
            answer.error = too_slow or f"connection failed: {reason(err)}"
            return stale and too_slow is None and isinstance(err, UnheardError)
        finally:
            if answer.response is None:
                answer.ended_ns = time.perf_counter_ns()
            if connection is not None:
                self._in_flight.pop(connection, None)
                if not connection.closed:
                    self._idle.append(connection)
        return False

    async def _watch(self) -> None:
        """Ends what takes too long."""
        while True:
            now_ns = time.perf_counter_ns()
            for connection, since_ns in list(self._in_flight.items()):
                if now_ns - since_ns > 1e9 * self._limits.request_s:
                    self._too_slow[connection] = f"not answered within {self._limits.request_s:g} s"
                elif now_ns - connection.now_ns > 1e9 * self._limits.silent_s:
                    self._too_slow[connection] = f"nothing was heard for {self._limits.silent_s:g} s"
                if connection in self._too_slow:
                    connection.close()
            await asyncio.sleep(WATCH_EVERY_S)


async def _until(at_ns: int) -> None:
    """Returns then, and not before: uvloop counts in milliseconds, and may wake up one too early."""
    while (delay_s := (at_ns - time.perf_counter_ns()) / 1e9) > 0:
        await asyncio.sleep(delay_s)


class _LagTimer:
    """How late the event loop is, sampled by a bare callback and not too often: each sample adds to what a chunk costs the client."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._set()

    def stop(self) -> None:
        self._timer.cancel()

    def _set(self) -> None:
        self._due_s = time.perf_counter() + LAG_EVERY_S
        self._timer = self._loop.call_later(LAG_EVERY_S, self._tick)

    def _tick(self) -> None:
        self.lags_ms.append(max(0.0, 1e3 * (time.perf_counter() - self._due_s)))
        self._set()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the garbage collector: it would stop the thread for longer than a chunk takes, and most of what it looks at is there to stay."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _result(request: Request, answer: _Answer, address: Address) -> Result:
    error, stream = answer.error, None
    if error is None and answer.response.status != 200:
        body = b"".join(read for _, read in answer.response.reads).decode("utf-8", errors="replace")
        error = f"status {answer.response.status}: {address.shown(body.strip(), SHOWN_CHARACTERS)}"
    elif error is None:
        try:
            stream = parse_stream(answer.response.reads)
        except MalformedStreamError as err:
            error = f"malformed answer: {address.shown(str(err), SHOWN_CHARACTERS)}"
    if stream is None:
        return Result(request.prompt_id, answer.intended_ns, answer.sent_ns, answer.ended_ns, error, answer.connect_ms)
    return Result(request.prompt_id, answer.intended_ns, answer.sent_ns, answer.ended_ns, None, answer.connect_ms, stream.token_ids, stream.text, stream.finish_reason,
                  stream.prompt_tokens, stream.cached_tokens, stream.output_tokens, stream.chunk_ns, stream.chunk_tokens, stream.drafts, stream.per_position)
