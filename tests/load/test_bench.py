import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from raysd.cli import main
from raysd.errors import ExperimentError
from raysd.experiment.sweep import REQUEST_LIMIT_S, SILENCE_LIMIT_S
from raysd.load.arrivals import Load
from raysd.load.ask import ask_text
from raysd.load.bench import Asked, make_requests, told_acceptance, write_bench
from raysd.load.requests import Result
from raysd.load.run import Limits
from raysd.load.selftest import mock_server


@pytest.fixture(scope="module")
def url():
    with mock_server("--ttft-ms", "5", "--step-ms", "2") as address:
        yield address.url


def test_a_bench_tells_the_same_as_a_document_and_for_people(url, tmp_path, capsys):
    asked = ["bench", url, "--concurrency", "2", "--requests", "6", "--osl", "12", "--isl", "7", "--output", str(tmp_path / "out")]
    assert main([*asked, "--json"]) in (0, 1)  # a busy machine may be late
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["failures"], told["output_tokens"], told["isl"], told["endpoint"]) == (6, 0, 72, 7, "/v1/chat/completions")
    assert told["ttft_ms_p50"] >= 5 and told["tpot_ms_p50"] > 0 and told["model"] == "mock" and told["client"]["cpu_us_per_chunk"] > 0
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == told
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(sum(row["chunk_tokens"]) == row["output_tokens"] == 12 for row in rows)
    main([*asked, "--endpoint", "completions"])
    shown = capsys.readouterr().out
    assert "/v1/completions, concurrency 2: 6 requests" in shown and "TTFT, ms" in shown


def test_prompts_of_ones_own_are_asked_in_turn(url, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two three"}\n{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go on then"}]}\n')
    main(["bench", url, "--prompts", str(tmp_path / "p.jsonl"), "--requests", "4", "--concurrency", "1", "--osl", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["isl"] == 4


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "no server is named"), (["URL", "--rate", "2", "--concurrency", "2"], "a concurrency or a rate"), (["URL", "--poisson"], "no effect on a closed loop"),
    (["URL", "--requests", "2", "--concurrency", "4"], "4 requests are to be in flight, and there are 2"), (["URL", "--model", "other"], "no model other"),
    (["URL", "--prompts", "nowhere.jsonl"], "no prompt file"), (["URL", "--isl", "3", "--prompts", "x"], "no effect"), (["URL", "--api-key-env", "RAYSD_NO_SUCH_KEY"], "no variable"),
    (["ftp://x"], "not the URL of a server"), (["URL", "--request-limit-s", "0"], "a limit of 0.0 s"), (["URL", "--request-limit-s", "nan"], "a limit of nan s"),
    (["URL", "--silence-limit-s", "-1"], "a limit of -1.0 s"), (["URL", "--silence-limit-s", "inf"], "a limit of inf s"), (["URL", "--silence-limit-s", "901"], "above that of a request, 900 s"),
    (["URL", "--request-limit-s", "2", "--silence-limit-s", "3"], "above that of a request, 2 s"), (["URL", "--shards", "9"], "9 processes for 8 requests"),
    (["URL", "--selftest"], "no effect beside --selftest"), (["--selftest", "--model", "mock"], "--model"), (["--selftest", "--ignore-eos"], "--ignore-eos"),
    (["URL", "--ramp", "1e300"], "a ramp of 1e+300 s"), (["URL", "--rate", "1e-300"], "a rate of 1e-300"), (["URL", "--rate", "1e308", "--ramp", "1e308"], "a rate of 1e+308"),
    (["URL", "--rate", "1e-4"], "would be sent after 990000 s"), (["URL", "--rate", "4", "--ramp", "60"], "would never be reached"),
    (["URL", "--plain", "--ignore-eos"], "--ignore-eos"),
    (["URL", "--prompts", "PROMPTS", "--seed", "3"], "nothing is random"), (["URL", "--prompts", "PROMPTS", "--concurrency", "3"], "there are 2 prompts"),
    (["URL", "--prompts", "PROMPTS", "--concurrency", "3", "--requests", "9"], "there are 2 prompts"), (["URL", "--prompts", "EMPTY"], "not one prompt")])
def test_what_cannot_be_asked_exits_64_and_says_so(url, arguments, says, capsys, tmp_path):
    (tmp_path / "two.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "none.jsonl").write_text("")
    meant = {"URL": url, "PROMPTS": str(tmp_path / "two.jsonl"), "EMPTY": str(tmp_path / "none.jsonl")}
    assert main(["bench", *(meant.get(argument, argument) for argument in arguments)]) == 64
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("pace", "limits", "says"), [
    (["--step-ms", "50"], ["--request-limit-s", "0.2"], "not answered within 0.2 s"), (["--step-ms", "5000"], ["--silence-limit-s", "0.2"], "nothing was heard for 0.2 s"),
    (["--ttft-ms", "5000"], ["--request-limit-s", "0.2"], "within 0.2 s")])
def test_the_limits_of_a_request_and_of_silence_can_be_set(pace, limits, says, capsys):
    with mock_server("--ttft-ms", "5", *pace) as address:
        assert main(["bench", address.url, "--concurrency", "1", "--requests", "1", *limits, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failures"] == 1 and says in told["invalid_reasons"][0]


@contextlib.contextmanager
def accepting_slowly(every_s):
    """The URL of a server that lets one connect in so many seconds, answers in no time, and ends the connection."""
    def answer(connection):
        with connection, connection.makefile("rb") as asked:
            path, head = asked.readline(), iter(asked.readline, b"\r\n")
            length = next((int(line.split(b":")[1]) for line in list(head) if line.lower().startswith(b"content-length")), 0)
            asked.read(length)
            last = {"choices": [{"delta": {"content": "word"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
            body = b'{"data": [{"id": "m"}]}' if b"models" in path else b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(last).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def serve():
        while not over.wait(every_s):
            with contextlib.suppress(TimeoutError):
                answer(listener.accept()[0])

    over, listener = threading.Event(), socket.create_server(("127.0.0.1", 0), backlog=1)
    listener.settimeout(0.1)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join()
        listener.close()


def test_a_rate_at_which_requests_could_not_be_sent_is_not_valid(capsys):
    with accepting_slowly(0.1) as url:
        assert main(["bench", url, "--rate", "20", "--requests", "30", "--osl", "1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failures"] == 0 and told["kept_rate_frac"] < 0.9
    reasons = "; ".join(told["invalid_reasons"])  # a busy machine adds its own
    assert "later than asked for" in reasons and "of the asked rate" in reasons


def test_a_rate_that_was_kept_is_told_and_a_closed_loop_has_none(url, capsys):
    for load, kept in ((["--rate", "20", "--requests", "5"], pytest.approx(1, abs=0.5)), (["--concurrency", "1", "--requests", "2"], None)):
        main(["bench", url, *load, "--osl", "2", "--json"])
        assert json.loads(capsys.readouterr().out)["kept_rate_frac"] == kept


def test_a_bench_says_how_far_it_is_while_a_server_hangs(capsys, monkeypatch):
    monkeypatch.setattr("raysd.pipeline.display.LINE_INTERVAL_S", 0)
    with mock_server("--ttft-ms", "60000") as address:
        assert main(["bench", address.url, "--concurrency", "2", "--requests", "3", "--request-limit-s", "2.5", "--json"]) == 1
    shown = capsys.readouterr()
    assert f"bench: started ({address.url})" in shown.err and "answering 0/3 requests (0%), in_flight 2\n" in shown.err and json.loads(shown.out)["failures"] == 3


def test_the_help_says_the_limits_that_hold_by_default(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"one request may take; default: {REQUEST_LIMIT_S:g}" in told and f"default: {Limits().silent_s:g}, or the request's limit where that is less" in told


def test_silence_is_never_longer_than_a_request():
    assert (Limits().silent_s, Limits(request_s=5).silent_s, Limits(request_s=5, silence_s=2).silent_s) == (SILENCE_LIMIT_S, 5, 2)


def test_a_key_that_cannot_be_sent_is_refused_by_its_name(url, capsys, monkeypatch):
    monkeypatch.setenv("RAYSD_TEST_KEY", "secret\nx-other: 1")
    assert main(["bench", url, "--api-key-env", "RAYSD_TEST_KEY", "--debug"]) == 64
    told = capsys.readouterr().err
    assert "RAYSD_TEST_KEY" in told and "secret" not in told


NO_SERVER = "http://127.0.0.1:9"


@pytest.mark.parametrize("output", ["a file", "a file/below", "taken", "/proc/nothing/can/be/made/here"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_asked(output, tmp_path, capsys):
    (tmp_path / "a file").touch()
    (tmp_path / "taken" / "bench.json").mkdir(parents=True)
    assert main(["bench", NO_SERVER, "--output", str(tmp_path / output)]) == 64
    assert "--output" in capsys.readouterr().err


def run_with_largest_file(size_bytes, code):
    """What a Python process says, and its exit code, in which a file can be no larger: what is written beyond that fails, as on a disk that is full."""
    limited = f"import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({size_bytes}, {size_bytes})); {code}"
    return subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=100)


def test_an_output_without_space_is_refused_before_anything_is_asked(tmp_path):
    ended = run_with_largest_file(4096, f"import sys; from raysd.cli import main; sys.exit(main(['bench', '{NO_SERVER}', '--output', '{tmp_path}']))")
    assert ended.returncode == 64 and "--output" in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("too_large", ["rows", "told"])
def test_results_are_written_whole_or_not_at_all(tmp_path, too_large):
    write_bench(tmp_path, {"of": "before"}, [{"row": 1}])
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(before) == {"bench.json", "requests.jsonl"}
    told, rows = ({"of": "now"}, [{"row": "x" * 100}] * 1000) if too_large == "rows" else ({"of": "x" * 100_000}, [{"row": 2}])
    ended = run_with_largest_file(50_000, f"from pathlib import Path; from raysd.load.bench import write_bench; write_bench(Path('{tmp_path}'), {told}, {rows})")
    assert "ArtifactError" in ended.stderr and {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_written_at_the_end_is_told_all_the_same(url, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("raysd.load.bench.check_output", lambda folder: (folder / "bench.json").mkdir(parents=True))  # somebody makes it meanwhile
    assert main(["bench", url, "--requests", "1", "--concurrency", "1", "--osl", "2", "--output", str(tmp_path / "out"), "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["requests"] == 1 and "cannot be written" in shown.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bench.json"]


def test_an_interrupted_bench_says_what_is_true_of_it():
    with mock_server("--ttft-ms", "60000") as address:
        bench = subprocess.Popen([sys.executable, "-m", "raysd", "bench", address.url, "--concurrency", "2", "--requests", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs, and what they start, ignore it
        try:
            while "num_requests_running 2" not in ask_text(address, "/metrics"):
                assert bench.poll() is None
                time.sleep(0.05)
            bench.send_signal(signal.SIGINT)
            shown, told = bench.communicate(timeout=60)
        finally:
            bench.kill()
            bench.wait()
    assert bench.returncode == 130 and shown == "" and "interrupted; a bench has results only at its end" in told and "raysd run" not in told and "Traceback" not in told


def test_a_server_that_is_not_there_or_speaks_something_else_is_an_error(url, capsys):
    assert main(["bench", "http://127.0.0.1:9"]) == 1 and "did not answer" in capsys.readouterr().err
    assert main(["bench", url.replace("http:", "https:")]) == 1 and re.search(r"did not answer: \w+", capsys.readouterr().err)
    assert main(["bench", f"{url}/elsewhere"]) == 1 and "OpenAI-compatible" in capsys.readouterr().err


def test_requests_follow_from_the_seed_and_each_has_its_own():
    one, other = (make_requests(Asked(isl=5, seed=seed, temperature=0.7), Load(concurrency=2)) for seed in (1, 2))
    assert len(one) == 20 and len({request.prompt[0]["content"] for request in one}) == 20 and one != other
    assert one == make_requests(Asked(isl=5, seed=1, temperature=0.7), Load(concurrency=2)) and len({request.seed for request in one}) == 20
    assert len(make_requests(Asked(), Load(rate_s=1))) == 100
    assert len(make_requests(Asked(prompts=["a", "b", "c"]), Load(concurrency=2))) == 3, "each once"
    with pytest.raises(ExperimentError, match="no prompt of /v1/completions"):
        make_requests(Asked(prompts=[({"role": "user", "content": "a"},) * 2], endpoint="completions"), Load(concurrency=1))


def test_the_acceptance_is_told_only_where_the_server_tells_it_of_every_request():
    one, other, silent = Result("a", 0, 0, 9, drafts=4, per_position=(3, 1)), Result("b", 0, 0, 9, drafts=6, per_position=(2,)), Result("c", 0, 0, 9)
    assert told_acceptance([one, other]) == {"drafts": 10, "accepted": 6, "per_position": [5, 1], "acceptance_length": 1.6}
    assert set(told_acceptance([one, silent]).values()) == set(told_acceptance([]).values()) == {None}
