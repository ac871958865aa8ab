"""A stage on a machine whose clock is wrong: `python skewed_job.py AHEAD_S STAGE --experiment ... --store ...`; all else is as in jobs/STAGE.py."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

from raysd.backends.stages import edges
from raysd.pipeline.job import main

if __name__ == "__main__":
    ahead = timedelta(seconds=float(sys.argv[1]))
    raise SystemExit(main(sys.argv[2], edges, sys.argv[3:], clock=lambda: datetime.now(UTC) + ahead))
