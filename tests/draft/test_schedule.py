from __future__ import annotations

from raysd.draft.schedule import ConversationOrder, lr_factor


def test_the_learning_rate_rises_stays_and_falls():
    factors = [lr_factor(step, 100, 0.1, 0.5) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[49] == 1.0 and factors[75] == 0.5 and 0 < factors[99] <= 0.02


def test_every_epoch_holds_every_conversation_once_wherever_one_starts():
    order = ConversationOrder(7, seed=3).between(0, 21)
    assert all(sorted(order[i:i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert order[:7] != order[7:14]
    assert ConversationOrder(7, seed=3).between(5, 16) == order[5:16] and ConversationOrder(7, seed=4).between(0, 21) != order
