from __future__ import annotations

from types import SimpleNamespace

import pytest


def test_a_capture_engine_samples_all_rows_plainly_and_refuses_a_drafted_token():
    """In the engine tests of capture, this refusal is also what shows that no step computes a token twice."""
    # Late: it imports vLLM, which takes seconds of every process that only collects the tests.
    from raysd.backends.capture_steps import CaptureWorker

    seen = []
    worker = CaptureWorker()
    worker.model_runner = SimpleNamespace(sampler=lambda **arguments: seen.append(arguments) or "sampled", rejection_sampler=None)
    worker.sample_plainly()
    sample = worker.model_runner.rejection_sampler
    assert sample(SimpleNamespace(num_draft_tokens=[0, 0]), None, "logits", "metadata") == "sampled"
    assert seen == [{"logits": "logits", "sampling_metadata": "metadata"}]
    with pytest.raises(ValueError, match="drafted token"):
        sample(SimpleNamespace(num_draft_tokens=[0, 1]), None, "logits", "metadata")
