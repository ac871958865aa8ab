"""The scaling policy that takes acceptance into account."""

from types import SimpleNamespace

import pytest

from raysd.deployment.policy import SMALLEST_FRAC, ByAcceptance, replicas_for, worth_of


@pytest.mark.parametrize(("lengths", "worth"), [([], 1.0), ([2.5], 1.0), ([3.0], 1.0), ([2.0], 0.8), ([2.0, 3.0], 1.0), ([1.0], SMALLEST_FRAC), ([2.5, 1.5], 0.8)])
def test_a_replica_is_worth_what_its_drafts_are(lengths: list[float], worth: float):
    assert worth_of(lengths, 2.5) == pytest.approx(worth)


@pytest.mark.parametrize(("requests", "worth", "replicas"), [(0, 1, 1), (8, 1, 1), (8.1, 1, 2), (24, 1, 3), (24, 0.75, 4), (24, 0.8, 4), (1000, 1, 5), (0.1 + 0.2, 0.3 / 8, 1)])
def test_so_many_replicas_that_each_has_what_it_is_worth_within_bounds(requests: float, worth: float, replicas: int):
    assert replicas_for(requests, 8, worth, 1, 5) == replicas


def context(requests: float, lengths: dict | None) -> SimpleNamespace:
    return SimpleNamespace(total_num_requests=requests, current_num_replicas=2, target_num_replicas=2, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4,
                           aggregated_metrics=lengths, config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0))


def test_the_policy_reads_what_replicas_publish_and_takes_what_is_missing_for_good():
    policy = ByAcceptance(acceptance_length=2.5)
    assert policy(context(24, {"acceptance_length": {"a": 2.5, "b": 2.5}})) == (3, {})
    assert policy(context(24, {"acceptance_length": {"a": 1.6, "b": 1.6}})) == (4, {})
    assert policy(context(24, {"running": {"a": 3.0}}))[0] == policy(context(24, None))[0] == policy(context(24, {}))[0] == 3


def test_ray_takes_the_policy_with_its_arguments_and_asks_it():
    config = pytest.importorskip("ray.serve.config")
    scaling = config.AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=8,
                                       policy={"policy_function": "raysd.deployment.policy:ByAcceptance", "policy_kwargs": {"acceptance_length": 2.5}})
    asked = config.AutoscalingContext(deployment_id=None, deployment_name="d", app_name="a", current_num_replicas=2, target_num_replicas=2, running_replicas=[], total_num_requests=24.0,
                                      total_queued_requests=0.0, aggregated_metrics={"acceptance_length": {"a": 1.6}}, raw_metrics={}, capacity_adjusted_min_replicas=1,
                                      capacity_adjusted_max_replicas=4, policy_state={}, last_scale_up_time=None, last_scale_down_time=None, current_time=None, config=scaling)
    policy = scaling.policy.get_policy()
    made = policy(**scaling.policy.policy_kwargs) if isinstance(policy, type) else policy
    assert made(asked)[0] == 4
