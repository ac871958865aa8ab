from __future__ import annotations

import pytest
import torch

from raysd.backends.cpu_api_server import expand, install, scaled_mm, scaled_mm_out
from raysd.sweep.lossless import distribution_p_value


@pytest.mark.parametrize("rowwise", [False, True])
def test_the_product_is_torchs_own(rowwise):
    torch.manual_seed(0)
    a, b = torch.randn(5, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = (torch.rand(5, 1), torch.rand(1, 16)) if rowwise else (torch.tensor(0.5), torch.tensor(2.0))
    expected = ((a.double() * scale_a) @ (b.double() * scale_b)).float()
    torch.testing.assert_close(scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32), expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(5, 16, dtype=torch.bfloat16)
    assert scaled_mm_out(a, b, scale_a, scale_b, out=out) is out
    torch.testing.assert_close(out, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    if not rowwise:
        torch.testing.assert_close(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32), expected, rtol=1e-5, atol=1e-5)


def test_values_are_repeated_for_each_draft_token_of_their_request():
    output = torch.full((7,), 9.0)
    expand(output, torch.tensor([0.5, 0.0, 0.25]), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1, 128)
    assert output.tolist() == [0.5, 0.5, 1.0, 0.25, 0.25, 0.25, 9.0]


def test_vllm_samples_what_the_target_says_when_a_draft_proposes():
    """vLLM's own rejection sampler for CPU, as an engine sets it up: 6,000 requests with one draft of three tokens; where the draft was accepted up to a place, the token
    there must follow the target's distribution at the temperature asked for. Without `expand` in its place the temperature is whatever the memory holds."""
    library = install()
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    requests, vocab, k, temperature = 6000, 6, 3, 0.7
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(k + 1, vocab)
    draft = logits[:k].argmax(dim=1)
    metadata = SamplingMetadata(temperature=torch.full((requests,), temperature), all_greedy=False, all_random=True, top_p=None, top_k=None, generators={},
                                max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(requests),
                                presence_penalties=torch.zeros(requests), repetition_penalties=torch.ones(requests), output_token_ids=[[] for _ in range(requests)],
                                allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors())
    ends = k * torch.arange(1, requests + 1, dtype=torch.int32)
    judged = rejection_sampler.apply_sampling_constraints(logits[:k].repeat(requests, 1), ends, metadata)
    asked = (logits / temperature).softmax(dim=1)
    bonus = torch.multinomial(asked[k], requests, replacement=True).to(torch.int32)[:, None].contiguous()
    answers = rejection_sampler.rejection_sample(draft.repeat(requests).to(torch.int32), [k] * requests, k, ends, None, judged, bonus, metadata)
    for place in range(k + 1):
        tokens = answers[(answers[:, :place] == draft[:place]).all(dim=1), place]
        assert distribution_p_value(torch.multinomial(asked[place], 20000, replacement=True).tolist(), tokens.tolist()) > 1e-3, f"draft token {place}"
    del library
