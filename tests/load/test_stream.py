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
    ([chunk([1, 2, 3], "abort"), USAGE, DONE], "broke the answer off"),
    ([chunk([1, 2], "stop"), USAGE, DONE], "counts 3 output tokens, the chunks hold 2"), ([DONE, USAGE], "after \\[DONE\\]"), ([b"data: 7\n\n"], "not a JSON object"),
    ([event({"choices": [{"finish_reason": None}]})], "lacks something"), ([USAGE, event({"choices": [], "usage": {"prompt_tokens": 7}}), DONE], "lacks something"),
    ([event({"choices": 3})], "lacks something"), ([event({"id": 3})], "neither choices nor usage"),
    ([chunk([1, 2, 3], "stop"), event({"choices": [], "error": {"message": "out of memory"}}), USAGE, DONE], "reports an error.*out of memory"),
    ([event({"choices": [{"text": "a"}, {"text": "b", "index": 1}]})], "second answer"),
    ([b'data: {"choices": [], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"], "too deep"), ([b'data: {"choices": [], "error": ' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"], "too deep"),
    ([event({"choices": [{"text": "a"}]}), event({"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}), DONE], "though text came"),
    ([chunk([1, 2, 3], "stop"), event({"choices": [], "usage": {"prompt_tokens": 10**400, "completion_tokens": 3}}), DONE], "lacks something"),
    ([b"data: {\"choi"], "inside an event"), ([], "before \\[DONE\\]")])
def test_what_is_not_one_finished_completion_is_refused(reads, says):
    with pytest.raises(MalformedStreamError, match=says):
        parse_stream(list(enumerate(reads)))


def counted(text, output_tokens, finish_reason=None) -> bytes:
    """A chunk of a server that tells its usage continuously, and no token ids."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": {"prompt_tokens": 7, "completion_tokens": output_tokens}})


@pytest.mark.parametrize(("usages", "says"), [
    ([2, 1, 3], "falls from 2 to 1"), ([3, 3, 2], "falls from 3 to 2"), ([-1, 2, 3], "lacks something"), ([-2, -1, 0], "lacks something")])
def test_a_usage_that_is_nonsense_is_not_counted(usages, says):
    reads = [counted("a", usages[0]), counted("b", usages[1]), counted("c", usages[2], "stop"), DONE]
    with pytest.raises(MalformedStreamError, match=says):
        parse_stream(list(enumerate(reads)))


@pytest.mark.parametrize("last", [
    {"prompt_tokens": -7, "completion_tokens": 3}, {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}])
def test_no_count_of_a_usage_is_below_none(last):
    with pytest.raises(MalformedStreamError, match="lacks something"):
        parse_stream([(10, chunk([1, 2, 3], "stop")), (20, event({"choices": [], "usage": last}) + DONE)])


def test_a_usage_that_comes_with_the_end_alone_makes_no_token_of_the_end():
    reads = [(10, event({"choices": [{"text": "a"}]})), (20, event({"choices": [{"text": "b"}]})), (900, counted("", 2, "stop")), (901, DONE)]
    stream = parse_stream(reads)
    assert stream.chunk_ns == (10, 20) and stream.chunk_tokens == () and stream.output_tokens == 2


def test_the_last_usage_may_come_without_choices():
    for last in ({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, {"choices": None, "usage": {"prompt_tokens": 7, "completion_tokens": 3}, "error": None}):
        assert parse_stream([(10, chunk([1, 2, 3], "stop")), (20, event(last) + DONE)]).output_tokens == 3


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_line_may_end_in_three_ways_and_its_event_arrives_with_it(ending):
    text = (chunk([1, 2]) + chunk([3], "stop")).replace(b"\n", ending)
    first = len(chunk([1, 2]).replace(b"\n", ending)) - (ending == b"\r\n")  # of CRLF, the CR ends the line already
    stream = parse_stream([*((at, text[at:at + 1]) for at in range(len(text))), (900, (USAGE + DONE).replace(b"\n", ending))])
    assert stream.chunk_tokens == (2, 1) and stream.chunk_ns[0] == first - 1


def said(finish_reason=None, **delta) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def test_a_continuous_usage_tells_the_tokens_of_each_chunk():
    stream = parse_stream([(10, counted("ab", 2)), (20, counted("", 3)), (30, counted("c", 7, "stop")), (40, USAGE.replace(b": 3", b": 7") + DONE)])
    assert stream.chunk_tokens == (2, 1, 4) and stream.chunk_ns == (10, 20, 30) and stream.text == "abc" and stream.token_ids == ()


def test_the_first_chunk_of_a_chat_tells_the_role_and_is_no_token():
    reads = [(10, said(role="assistant", content="")), (20, said(content="Hel")), (30, said(content="lo")), (40, said("stop")), (50, USAGE + DONE)]
    stream = parse_stream(reads)
    assert stream.chunk_ns == (20, 30) and stream.text == "Hello" and stream.output_tokens == 3
    assert stream.chunk_tokens == (), "how many tokens a chunk carries is not told, and not guessed"


def test_what_a_model_thinks_are_tokens_too():
    stream = parse_stream([(10, said(reasoning_content="hm")), (20, said("stop", content="yes")), (30, USAGE + DONE)])
    assert stream.chunk_ns == (10, 20)


def test_the_acceptance_of_a_request_is_read_where_vllm_tells_it():
    told = {"speculative_decoding": {"acceptance_histogram": [5, 3, 2, 1], "num_spec_steps": 11, "num_accepted_draft_tokens": 10, "num_draft_tokens": 33}}
    last = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}, "metrics": told})
    stream = parse_stream([(10, chunk([1, 2, 3], "stop")), (20, last + DONE)])
    assert (stream.drafts, stream.per_position) == (11, (6, 3, 1)) and stream.cached_tokens == 4
    assert parse_stream([(10, chunk([1, 2, 3], "stop")), (20, USAGE + DONE)]).drafts is None
