import json

import pytest

from raysd.load.stream import MalformedStreamError, parse_stream


def event(document) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(token_ids, finish_reason=None) -> bytes:
    return event({"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


def test_an_event_arrives_with_its_last_byte():
    one = chunk([1, 2])
    stream = parse_stream([(10, one[:9]), (20, one[9:] + chunk([3], "stop")), (30, USAGE + DONE)])
    assert stream.token_ids == (1, 2, 3) and stream.chunk_ns == (20, 20) and stream.chunk_tokens == (2, 1)
    assert (stream.finish_reason, stream.prompt_tokens, stream.output_tokens) == ("stop", 7, 3)


def test_windows_line_ends_comments_and_chunks_without_tokens_are_fine():
    text = (b": ping\n\n" + chunk([1, 2, 3]) + b"event: message\n" + chunk([], "length") + USAGE + DONE).replace(b"\n", b"\r\n")
    stream = parse_stream([(at, text[at:at + 1]) for at in range(len(text))])
    assert stream.token_ids == (1, 2, 3) and len(stream.chunk_ns) == 1 and stream.finish_reason == "length"


@pytest.mark.parametrize(("reads", "says"), [
    ([chunk([1, 2, 3], "stop"), USAGE], "before \\[DONE\\]"), ([chunk([1, 2, 3], "stop"), DONE], "no usage"), ([chunk([1, 2, 3]), USAGE, DONE], "no finish_reason"),
    ([chunk([1, 2], "stop"), USAGE, DONE], "counts 3 output tokens, the chunks hold 2"), ([DONE, USAGE], "after \\[DONE\\]"), ([b"data: 7\n\n"], "not a JSON object"),
    ([event({"choices": [{"text": "a", "finish_reason": None}]})], "return_token_ids"), ([event({"choices": 3})], "lacks something"),
    ([b"data: {\"choi"], "inside an event"), ([], "before \\[DONE\\]")])
def test_what_is_not_one_finished_completion_is_refused(reads, says):
    with pytest.raises(MalformedStreamError, match=says):
        parse_stream(list(enumerate(reads)))
