"""vLLM's scheduler for capture: it schedules no drafted token.

vLLM's `extract_hidden_states` method is built as a draft: it proposes the token that was just sampled, so that something is proposed, and the next step computes it
for nothing (vllm/v1/spec_decode/extract_hidden_states.py). Every step then computes two tokens of a conversation where one is used.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class CaptureScheduler(Scheduler):
    """Named by `scheduler_cls`; needs `async_scheduling` off, where drafts do not pass through the scheduler."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Leaves every request without a draft."""
