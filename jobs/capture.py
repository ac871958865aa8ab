"""Captures the target's answers and hidden states, as one Ray job.

ray job submit --working-dir . -- python jobs/capture.py --experiment EXPERIMENT --store STORE
"""

from raysd.pipeline.job import Edges, main


def outside() -> Edges:
    from raysd.backends.stages import edges

    return edges()


if __name__ == "__main__":
    raise SystemExit(main("capture", outside))
