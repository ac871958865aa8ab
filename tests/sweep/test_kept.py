import pytest

from raysd.experiment import load_experiment
from raysd.sweep.kept import keep, kept
from tests.stage_runs import attempt, piece


@pytest.fixture
def experiment(write_experiment):
    return load_experiment(write_experiment())


def test_what_was_kept_comes_back_to_a_later_attempt_under_its_identity_and_kind_only(experiment, tmp_path):
    document = {"cell": {"output_tok_s": 1.25, "k": None, "arm": "é\ud800"}, "requests": [{"chunk_ms": [1.5, 2.5]}]}
    with attempt(tmp_path / "store", experiment) as run:
        keep(run, "cells", {"arm": "none", "block": 0}, document)
    with attempt(tmp_path / "store", experiment) as run:
        assert kept(run, "cells", {"block": 0, "arm": "none"}) == document
        assert kept(run, "cells", {"arm": "none", "block": 1}) is None
        assert kept(run, "answers", {"arm": "none", "block": 0}) is None


def test_a_damaged_piece_is_done_again(experiment, tmp_path):
    with attempt(tmp_path / "store", experiment) as run:
        keep(run, "cells", {"block": 0}, {"output_tok_s": 1.25})
        [path] = [path for path in piece(tmp_path / "store", "cells").iterdir() if path.suffix == ".json"]
        whole = path.read_text()
        for damaged in (whole.replace("1.25", "9.25"), whole[:-5], "", "[]", "7"):
            path.write_text(damaged)
            assert kept(run, "cells", {"block": 0}) is None
        keep(run, "cells", {"block": 0}, {"output_tok_s": 1.5})
        assert kept(run, "cells", {"block": 0}) == {"output_tok_s": 1.5}
