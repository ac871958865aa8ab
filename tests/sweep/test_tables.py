"""The tables of a sweep, written and read back."""

import operator

from raysd.errors import EngineError
from raysd.experiment.sweep import Workload
from raysd.sweep.cells import Cell
from raysd.sweep.measure import unmeasured
from raysd.sweep.tables import CELLS, read_rows, write_partitioned

NAMES = ("1k/1k", "1k-1k", "1k_1k", "Chat (1k/1k), v1.0: a+b", "1", "null", "none", "a" + " " * 62 + "b", "a" + "/" * 62 + "b")


def test_cells_are_read_back_by_the_names_that_workloads_may_have(tmp_path):
    names = [Workload(name=name).name for name in NAMES]
    rows = [unmeasured(Cell(arm, name, 16, 1, k, block, 4), "node", EngineError(what="it died", where="a.log", fix="look")).row
            for name in names for arm, k in (("none", None), ("bf16", 3)) for block in range(2)]
    write_partitioned(tmp_path / "cells", CELLS, rows)
    read = read_rows(tmp_path / "cells", list(CELLS))
    assert len(list((tmp_path / "cells").glob("*/*/*.parquet"))) == 2 * len(names), "a folder for each, and none within another"
    key = operator.itemgetter("workload", "arm", "block")
    assert sorted(read, key=key) == sorted(rows, key=key)
