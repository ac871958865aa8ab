"""Every node of a real Ray cluster is looked at by a task on it."""

from __future__ import annotations

import platform

import pytest

from raysd.backends.cluster_nodes import look_at_nodes
from raysd.backends.local_ray import local_ray
from raysd.checks.node_facts import look_at_this_node
from raysd.checks.nodes import examine_nodes
from raysd.errors import RaysdError


def test_the_nodes_of_a_cluster_are_looked_at_by_tasks():
    with local_ray() as address:
        nodes = look_at_nodes(address)
    assert [node.host for node in nodes] == [platform.node()] and nodes[0].ray_gpus == 0
    assert nodes[0].packages == look_at_this_node().packages
    assert not [finding for finding in examine_nodes(nodes, None) if finding.code == "nodes-differ"]


def test_a_cluster_that_is_not_there_is_said_within_seconds():
    with pytest.raises(RaysdError, match="no Ray job server answers"):
        look_at_nodes("http://127.0.0.1:9")
