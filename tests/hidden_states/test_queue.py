import pytest

from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.hidden_states.queue import MostBytes, check_queue, most_bytes


@pytest.fixture
def experiment(write_experiment):
    def make(workers: int, **capture):
        experiment = load_experiment(write_experiment())
        return experiment.model_copy(update={"train": experiment.train.model_copy(update={"workers": workers, "conversations_per_step": 4}),
                                             "capture": experiment.capture.model_copy(update={"max_tokens": 10, "shard_conversations": 3, "queue_bytes": 2**20} | capture)})

    return make


def test_states_take_at_most_what_the_longest_prompts_come_to(experiment):
    most = most_bytes(experiment(1), [5, 9, 7, 8], [30], layers=4, hidden_size=64)
    token = 4 * 64 * 2
    assert most == MostBytes(40 * token, (40 + 19 + 18) * token, 1)


def test_several_workers_leave_a_group_and_two_steps_in_the_queue(experiment):
    assert most_bytes(experiment(2), [5] * 20, [5], 4, 64).slots == 3 + 2 * 4
    # A group is never larger than the split that it is of.
    assert most_bytes(experiment(2, shard_conversations=256), [5] * 20, [5] * 3, 4, 64).slots == 20 + 2 * 4


def test_a_queue_that_is_too_small_is_refused(experiment):
    check_queue(experiment(1), MostBytes(2**20, 2**30, 1))
    with pytest.raises(ExperimentError, match="one conversation take up to 1048577 bytes") as caught:
        check_queue(experiment(1), MostBytes(2**20 + 1, 2**30, 1))
    assert caught.value.where == "capture.queue_bytes" and "1048577" in caught.value.fix and "shard_conversations" not in caught.value.fix
    with pytest.raises(ExperimentError, match="14 conversations take up to 1048600 bytes") as caught:
        check_queue(experiment(2), MostBytes(74900, 2**19, 14))
    assert "capture.shard_conversations" in caught.value.fix
