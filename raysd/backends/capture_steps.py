"""What a vLLM engine for capture leaves out of its steps, because nothing is drafted in it.

vLLM's `extract_hidden_states` method is built as a draft: it proposes the token that was just sampled, so that something is proposed, and the next step computes it
for nothing (vllm/v1/spec_decode/extract_hidden_states.py). Every step then computes two tokens of a conversation where one is used, and compares them.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class CaptureScheduler(Scheduler):
    """Schedules no drafted token. Named by `scheduler_cls`; needs `async_scheduling` off, where drafts do not pass through the scheduler."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Leaves every request without a draft."""


class CaptureWorker:
    """What a worker can be asked for by `collective_rpc`, too. Named by `worker_extension_cls`."""

    def sample_plainly(self) -> None:
        """Has the model runner sample as it does without a draft. Its rejection sampler copies all logits three times, a twentieth of a small target's step,
        to find that there is nothing to reject (vllm/v1/sample/rejection_sampler.py)."""
        runner = self.model_runner
        runner.rejection_sampler = PlainSampler(runner.sampler)


class PlainSampler:
    """In the place of vLLM's RejectionSampler, where no token was drafted."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        """vLLM's SamplerOutput with one token a request. logits: [requests, vocabulary]. Raises ValueError if a token was drafted."""
        if sum(metadata.num_draft_tokens):
            raise ValueError("a capture engine has scheduled a drafted token")
        return self._sampler(logits=logits, sampling_metadata=sampling_metadata)
