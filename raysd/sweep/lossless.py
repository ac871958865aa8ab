"""Whether an arm says what the target says: greedy answers compared, and where they part, whether that is a tie of rounding or a fault.

Exact equality is not to be had in bf16: batch shapes change the last bit, and two tokens within one rounding step of each other change places, in
the baseline too. So where two answers first differ, the target itself is asked for the log-probabilities of both tokens after the text
that they share: if they are close the answers are a near tie, and if not, the arm said something that the target would not have said.

At a temperature above 0 no answer is the right one, and many are compared instead: they must follow one distribution with a draft and without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from raysd.errors import EngineError, MeasurementError
from raysd.load.address import Address
from raysd.load.ask import ask_json

Verdict = Literal["equal", "near_tie", "broken"]


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    prompt_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`: an end token, which is the last of token_ids; `length`: all that was asked for."""


@dataclass(frozen=True)
class Difference:
    """Where two answers to one prompt part."""

    position: int
    """Tokens of the answer that they share."""
    token_none: int | None
    """The baseline's next token; None if its answer is over."""
    token_arm: int | None
    """The arm's."""


@dataclass(frozen=True)
class Comparison:
    """What came of comparing an arm's answer with the baseline's."""

    prompt_id: str
    verdict: Verdict
    difference: Difference | None = None
    """None if they are equal."""
    gap_nat: float | None = None
    """How much more likely the target finds one of the two tokens than the other; None if one answer just ends, which no rounding explains."""


LEAST_EXPECTED = 5.0
"""What a chi-square test must expect of an outcome in each sample (Cochran, Biometrics 10, 1954); rarer ones are counted together."""

TokenGap = Callable[[Sequence[int], int, int], float]
"""`gap(token_ids, a, b)`: |log p(a) - log p(b)| in nat, for the token that the target puts after token_ids."""


def first_difference(none: Answer, arm: Answer) -> Difference | None:
    """Where the answers part; None if they are the same tokens. An end token is a token like any other."""
    for position, (token_none, token_arm) in enumerate(zip(none.token_ids, arm.token_ids, strict=False)):
        if token_none != token_arm:
            return Difference(position, token_none, token_arm)
    shared = min(len(none.token_ids), len(arm.token_ids))
    if len(none.token_ids) == len(arm.token_ids):
        return None
    return Difference(shared, *(answer.token_ids[shared] if len(answer.token_ids) > shared else None for answer in (none, arm)))


def compare(none: Answer, arm: Answer, prompt_token_ids: Sequence[int], near_tie_nat: float, gap: TokenGap) -> Comparison:
    """The verdict on one answer. `gap` asks the target, and is called only where the answers part."""
    difference = first_difference(none, arm)
    if difference is None:
        return Comparison(none.prompt_id, "equal")
    if difference.token_none is None or difference.token_arm is None:
        return Comparison(none.prompt_id, "broken", difference)
    gap_nat = gap([*prompt_token_ids, *none.token_ids[:difference.position]], difference.token_none, difference.token_arm)
    return Comparison(none.prompt_id, "near_tie" if gap_nat <= near_tie_nat else "broken", difference, gap_nat)


def counts(comparisons: Sequence[Comparison]) -> dict[Verdict, int]:
    """How many answers got each verdict."""
    return {verdict: sum(comparison.verdict == verdict for comparison in comparisons) for verdict in ("equal", "near_tie", "broken")}


def served_gap(address: Address, model: str) -> TokenGap:
    """The gap as a vLLM server with the target and no draft gives it. Raises EngineError if it does not answer with both log-probabilities."""

    def gap(token_ids: Sequence[int], a: int, b: int) -> float:
        # `logprob_token_ids` gives these two exactly, whatever their rank; the top 20 would leave an unlikely one out.
        answer = ask_json(address, "/v1/completions", {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "logprobs": 1,
                                           "logprob_token_ids": [a, b], "return_tokens_as_token_ids": True, "ignore_eos": True})
        try:
            of_token = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            return abs(of_token[f"token_id:{a}"] - of_token[f"token_id:{b}"])
        except (KeyError, IndexError, TypeError) as err:
            raise EngineError(what=f"the engine did not give the log-probabilities of tokens {a} and {b}: {str(answer)[:300]}", where=address.url,
                              fix="use a vLLM whose /v1/completions knows `logprob_token_ids` (0.32 does)") from err

    return gap


def distribution_p_value(none: Sequence[Hashable], arm: Sequence[Hashable]) -> float:
    """How likely two samples of one distribution differ as much as these: Pearson's chi-square test of homogeneity, in [0, 1].

    none, arm: independent outcomes without a draft and with one, say the token that each of many answers to one prompt has at one place. Outcomes too rare to
    be compared alone are compared as one; if that leaves a single outcome, nothing differs that could be told, and the value is 1. Raises MeasurementError if
    a sample is so small that no outcome can be compared: that would pass for agreement.
    """
    from scipy.stats import chi2_contingency

    smaller = min(len(none), len(arm))
    if smaller < 2 * LEAST_EXPECTED:
        raise MeasurementError(what=f"{len(none)} and {len(arm)} answers are too few to compare distributions", where="the sampled answers",
                               fix=f"sample at least {2 * LEAST_EXPECTED:g} of each, and some hundreds to find anything")
    counted = Counter(none), Counter(arm)
    both = counted[0] + counted[1]
    share = smaller / (len(none) + len(arm))
    common = [outcome for outcome, times in both.items() if times * share >= LEAST_EXPECTED]
    table = [[sample[outcome] for outcome in common] + [sample.total() - sum(sample[outcome] for outcome in common)] for sample in counted]
    rest = table[0][-1] + table[1][-1]
    if rest * share < LEAST_EXPECTED:  # too few for a column of their own: they join the rarest of the others
        rarest = min(range(len(common)), key=lambda column: table[0][column] + table[1][column])
        for row in table:
            row[rarest] += row.pop()
    if len(table[0]) == 1:
        return 1.0
    return float(chi2_contingency(table, correction=False).pvalue)
