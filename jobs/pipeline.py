"""The whole chain as one Ray job without a GPU; it submits each stage as a job of its own to the cluster that it runs in.

ray job submit --working-dir . -- python jobs/pipeline.py --experiment EXPERIMENT --store STORE
"""

from raysd.cli import run_here

if __name__ == "__main__":
    raise SystemExit(run_here())
