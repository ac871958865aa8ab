"""What a job tells its runner survives the log."""

from __future__ import annotations

import io
import json

import pytest

from raysd.errors import ExperimentError, StageError, from_dict
from raysd.pipeline.events import ErrorEvent, EventProgress, ProgressEvent, read_event, write_error, write_event


def lines_of(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().split("\n") if line]


def test_progress_and_errors_read_back_equal():
    stream = io.StringIO()
    event = ProgressEvent("answering \u2713", 3, 10, "prompts", {"tok_s": 673.5})
    write_event(event, stream)
    write_error(ExperimentError(what="k is 9", where="sweep.k", fix="use 1 to 8"), stream)
    first, second = lines_of(stream)
    assert read_event(first) == event
    error = read_event(second)
    assert isinstance(error, ErrorEvent) and type(from_dict(error.error)) is ExperimentError


def test_an_error_starts_a_line_of_its_own():
    stream = io.StringIO("a library's unfinished line")
    stream.seek(0, io.SEEK_END)
    write_error(StageError(what="w", where="x", fix="f"), stream)
    assert isinstance(read_event(lines_of(stream)[-1]), ErrorEvent)


def test_an_unknown_kind_of_error_still_shows():
    assert type(from_dict({"kind": "FutureError", "what": "w", "where": "x", "fix": "f"})) is StageError


@pytest.mark.parametrize("line", ["", "text", "@raysd ", "@raysd {", "@raysd []", '@raysd {"doing"', '@raysd {"unknown": 1}', " @raysd {}"])
def test_other_lines_are_no_events(line: str):
    assert read_event(line) is None


def test_progress_is_told_twice_a_second_and_at_each_turn():
    now, stream = [0.0], io.StringIO()
    progress = EventProgress(stream, interval_s=0.5, clock=lambda: now[0])
    for second in range(20):
        now[0] = second / 10
        progress("training", second, 19)
    progress("publishing")
    told = [json.loads(line.removeprefix("@raysd ")) for line in lines_of(stream)]
    assert [event["done"] for event in told] == [0, 5, 10, 15, 19, None]
    assert told[-1]["doing"] == "publishing"
