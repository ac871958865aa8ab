from __future__ import annotations

from raysd.draft.schedule import conversation_order, lr_factor


def test_the_learning_rate_rises_stays_and_falls():
    factors = [lr_factor(step, 100, 0.1, 0.5) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[49] == 1.0 and factors[75] == 0.5 and 0 < factors[99] <= 0.02


def test_every_epoch_holds_every_conversation_once_and_prefixes_agree():
    order = conversation_order(7, 21, seed=3)
    assert all(sorted(order[i:i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert order[:7] != order[7:14]
    assert conversation_order(7, 10, seed=3) == order[:10] and conversation_order(7, 21, seed=4) != order
