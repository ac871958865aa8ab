"""Writes the report, as one Ray job.

ray job submit --working-dir . -- python jobs/report.py --experiment EXPERIMENT --store STORE
"""

from raysd.pipeline.job import Edges, main


def outside() -> Edges:
    from raysd.backends.stages import edges

    return edges()


if __name__ == "__main__":
    raise SystemExit(main("report", outside))
