from raysd.sweep.kept import keep, kept


def test_what_was_kept_comes_back_under_its_identity_only(tmp_path):
    document = {"cell": {"output_tok_s": 1.25, "k": None, "arm": "é"}, "requests": [{"chunk_ms": [1.5, 2.5]}]}
    keep(tmp_path / "cells", {"arm": "none", "block": 0}, document)
    assert kept(tmp_path / "cells", {"block": 0, "arm": "none"}) == document
    assert kept(tmp_path / "cells", {"arm": "none", "block": 1}) is None
    assert kept(tmp_path / "nothing", {"arm": "none"}) is None


def test_a_damaged_piece_is_done_again(tmp_path):
    keep(tmp_path, {"block": 0}, {"output_tok_s": 1.25})
    [path] = tmp_path.iterdir()
    whole = path.read_text()
    for damaged in (whole.replace("1.25", "9.25"), whole[:-5], "", "[]", "7"):
        path.write_text(damaged)
        assert kept(tmp_path, {"block": 0}) is None
    path.write_text(whole)
    assert kept(tmp_path, {"block": 0}) == {"output_tok_s": 1.25}
