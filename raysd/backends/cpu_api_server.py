"""vLLM's OpenAI server on CPU, mended where its CPU build is slow or wrong: `python -m raysd.backends.cpu_api_server ...`, arguments as vLLM's own.

Two things are replaced: torch's FP8 product, which takes seconds, and what a draft's tokens are judged by at a temperature above 0, which is not set at all.

On a CPU with AMX but without its FP8 unit, torch hands `_scaled_mm` to oneDNN, whose only kernel for it there is a reference loop: 2.1 s for 64 x 1152 x 960,
where float32 copies and one float32 product take 0.03 s on the same two cores. The result is the same: FP8 values and their products are exact in float32.
A CPU with the unit never gets here: vLLM then has a kernel of its own. Every arm's engine is started this way; only FP8 layers call the function.

With a draft, vLLM repeats each request's temperature, top-k and top-p once for each of its draft tokens (`expand_batch_to_tokens`). In the CPU build of 0.32 the
kernel for that (`_expand_kernel_impl`) writes into a copy, unless the values are 64-bit integers, and leaves its output as the memory was found: the target's
logits are then divided by whatever lay there, and answers at a temperature above 0 do not follow the target's distribution. Greedy answers are not touched by it.

vLLM starts its engine and its workers by multiprocessing's spawn, which imports the main module in each of them: so this holds in all of its processes.
"""

from __future__ import annotations

import runpy
import warnings

import torch


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
              scale_result: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False) -> torch.Tensor:
    """`aten::_scaled_mm`: (a * scale_a) @ (b * scale_b) + bias for FP8 a [M, K] and b [K, N], scales of one value or [M, 1] and [1, N]; [M, N] in out_dtype."""
    product = (a.float() @ b.float()) * scale_a * scale_b
    if bias is not None:
        product = product + bias
    if scale_result is not None:
        product = product * scale_result
    return product.to(out_dtype or a.dtype)


def scaled_mm_out(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
                  scale_result: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, *,
                  out: torch.Tensor) -> torch.Tensor:
    """`aten::_scaled_mm.out`, which compiled graphs call."""
    return out.copy_(scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype))


def expand(output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: float, replace_to: float, MAX_NUM_TOKENS: int | None = None) -> None:
    """vLLM's `expand_kernel`: each of the values [requests] into as many places of output [tokens] as its request has draft tokens, and replace_to in the place
    of a replace_from. ends: where each request's tokens end. MAX_NUM_TOKENS: a size of the GPU kernel, without a meaning here."""
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    expanded = torch.repeat_interleave(values.masked_fill(values == replace_from, replace_to), counts)
    output[:len(expanded)].copy_(expanded)


def install() -> torch.library.Library:
    """Puts all of them in place on CPU, the products for as long as the library that is returned lives.

    To be called before vLLM chooses its kernels, which it does when a platform's engine is set up.
    """
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that something is overridden is the intention
        library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
        library.impl("_scaled_mm.out", scaled_mm_out, "CPU", allow_override=True)
    return library


if __name__ in ("__main__", "__mp_main__"):
    LIBRARY = install()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
