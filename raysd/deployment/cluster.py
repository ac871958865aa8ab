"""Variables of a cluster's nodes that Serve reads when Ray starts there: what they are to be, and what it costs to be without."""

from __future__ import annotations

import math

from raysd.experiment.serve import ServeSection

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
WITHOUT_HAPROXY = "requests pass Serve's own proxy, written in Python, instead of HAProxy, and each chunk of an answer takes its time on a core there"


def cluster_variables(section: ServeSection) -> dict[str, str]:
    """To be set on every node before `ray start`, and in a RayCluster on head and workers."""
    longest_s = str(math.ceil(section.longest_answer_s))
    return {HAPROXY: "1",
            # What the user's code does then runs in the replica's own loop: no thread is passed on the way of a chunk.
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            # A HAProxy that was replaced by one of a newer configuration ends so long after, with all that still streams through it.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": longest_s}
