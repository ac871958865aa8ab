"""Measures the arms under load, as one Ray job.

ray job submit --working-dir . -- python jobs/sweep.py --experiment EXPERIMENT --store FOLDER
"""

from raysd.pipeline.job import StageFunctions, main


def functions() -> StageFunctions:
    from raysd.backends.stages import stage_functions

    return stage_functions()


if __name__ == "__main__":
    raise SystemExit(main("sweep", functions))
