from __future__ import annotations

import pytest
import torch

from raysd.backends.cpu_api_server import scaled_mm, scaled_mm_out


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
