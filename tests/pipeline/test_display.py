"""What a person sees of a run."""

from __future__ import annotations

import io

from raysd.pipeline.display import LiveDisplay, PlainDisplay, TimeLeft, describe, open_display


def test_a_line_says_how_far_it_is_and_with_which_units():
    assert describe("answering", 128, 1032, "prompts", {"output_tok_s": 673.04}) == "answering 128/1,032 prompts (12%), output_tok_s 673"
    assert describe("reading", 1234567, 2.5e6, "tokens", {}) == "reading 1,234,567/2,500,000 tokens (49%)"
    assert describe("loading", None, None, "", {}) == "loading"
    assert describe("training", 7, None, "steps", {"loss": 1.23456}) == "training 7 steps, loss 1.235"
    assert describe("waiting", 0, 0, "", {}) == "waiting 0"


def test_plain_lines_come_at_most_every_ten_seconds():
    now, stream = [0.0], io.StringIO()
    display = PlainDisplay(stream, clock=lambda: now[0])
    progress = display.stage_started("train", 2, "never run")
    for second in range(36):
        now[0] = second
        progress("training", second, 36, "steps")
    display.stage_ended("train", "done", 187)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train: started, attempt 2 (never run)"
    assert [line.split()[1] for line in lines[1:-1]] == ["0:10", "0:20", "0:30"]
    assert lines[1] == "train: 0:10 training 10/36 steps (28%), 0:26 left"
    assert lines[-1] == "train: done in 3:07"


def test_a_line_says_how_long_it_will_take_at_the_pace_of_its_own_activity():
    now = [0.0]
    left = TimeLeft(lambda: now[0])
    assert left("starting", None, None) == "" and left("training", 100, 400) == ""  # goes on from step 100
    now[0] = 50.0
    assert left("training", 200, 400) == ", 1:40 left"
    assert left("training", 400, 400) == ""
    assert left("serving", 0, 2) == "" and left("serving", 0, 2) == ""


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    assert isinstance(open_display(io.StringIO()), PlainDisplay)


def test_the_live_display_keeps_what_is_finished():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with open_display(stream) as display:
        assert isinstance(display, LiveDisplay)
        display.stage_cached("capture")
        progress = display.stage_started("train", 1, "train.lr changed: 0.001 -> 0.0005 [bold]")
        progress("training", 5, 10, "steps", loss=1.0)
        progress("waiting")
        display.stage_ended("train", "done", 61)
    assert "capture" in stream.getvalue() and "done in 1:01" in stream.getvalue()
