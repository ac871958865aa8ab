"""The small parts of a draft, as vLLM computes them for the config.json that we write: the norm, and the rotation of heads by position.

transformers is no measure here: its Llama rotates whole heads where the config asks for a part of them, and stretches `dynamic` and `longrope` by the
sequence at hand, vLLM by the config (vllm/model_executor/layers/rotary_embedding).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from raysd.draft.shape import rotated_width


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """By hand: torch takes it apart on a CPU, and goes over the rows a dozen times on the way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        single = x.float()
        with torch.autocast(x.device.type, enabled=False):
            scale = torch.rsqrt(torch.linalg.vecdot(single, single)[..., None] / x.shape[-1] + eps)
            ctx.save_for_backward(x, weight, scale)
            return (single * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit, grad = x.float() * scale, grad.float()
        with torch.autocast(x.device.type, enabled=False):
            scaled = grad * weight.float()
            along = torch.linalg.vecdot(scaled, unit)[..., None] / x.shape[-1]
            to_weight = (grad * unit).flatten(0, -2).sum(0)
            to_x = scaled.addcmul_(unit, along, value=-1).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None


class Rotary(nn.Module):
    """Rotates the leading part of each head, its pairs of numbers either the two halves of that part (NeoX) or neighbours (interleaved, as DeepSeek)."""

    def __init__(self, frequencies_R: torch.Tensor, magnitude: float, interleaved: bool) -> None:
        """frequencies: radians per position of each of the R pairs; magnitude: multiplies the rotated part."""
        super().__init__()
        self._frequencies_R = frequencies_R  # no buffer: a draft that is cast to bf16 would round them, and turn distant positions at random
        self._magnitude, self._interleaved = magnitude, interleaved

    def forward(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """heads [n, K, D] at positions [n]."""
        if self._frequencies_R.device != positions.device:
            self._frequencies_R = self._frequencies_R.to(positions.device)
        angles = (positions[:, None].float() * self._frequencies_R)[:, None]
        cos, sin = (angles.cos() * self._magnitude).to(heads.dtype), (angles.sin() * self._magnitude).to(heads.dtype)
        width = 2 * angles.shape[-1]
        turned, kept = heads[..., :width], heads[..., width:]
        left, right = (turned[..., ::2], turned[..., 1::2]) if self._interleaved else turned.chunk(2, dim=-1)
        left, right = left * cos - right * sin, right * cos + left * sin
        turned = torch.stack([left, right], dim=-1).flatten(-2) if self._interleaved else torch.cat([left, right], dim=-1)
        return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


def rotary_frequencies(rope: dict[str, Any], head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each rotated pair of a head, and the factor of cosine and sine. rope: a DraftShape's."""
    width, theta, kind = rotated_width(rope, head_dim), rope["rope_theta"], rope["rope_type"]
    if kind == "dynamic":  # one base for all lengths; without `alpha` the target's own as long as it is trained for max_positions
        stretch = rope.get("alpha") or rope["factor"] * max_positions / rope.get("max_trained_positions", max_positions) - (rope["factor"] - 1)
        theta *= stretch ** (width / (width - 2))
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, theta, width, rope), _yarn_magnitude(rope)
    if kind == "longrope":  # draft_shape makes short and long factors one
        original = rope["original_max_position_embeddings"]
        stretch = max(1.0, max_positions / original)
        return plain / torch.tensor(rope["long_factor"], dtype=torch.float32), math.sqrt(1 + math.log(stretch) / math.log(original))
    return plain, 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's correction of attention for a context stretched by `factor` (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_magnitude(rope: dict[str, Any]) -> float:
    if "attention_factor" in rope:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(rope["factor"], rope["mscale"]) / yarn_mscale(rope["factor"], rope["mscale_all_dim"])
    return yarn_mscale(rope["factor"])


def _yarn(plain: torch.Tensor, theta: float, width: int, rope: dict[str, Any]) -> torch.Tensor:
    """Pairs that turn often within the original context keep their frequency, those that turn rarely are slowed by `factor`, a ramp lies between."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(rope["original_max_position_embeddings"] / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(rope.get("beta_fast", 32)), pair_that_turns(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope["factor"] * ramp + plain * (1 - ramp)


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """As YaRN, with the ramp over the wavelength and its ends named by the config (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > low).float()
    return (1 - keep) * plain / rope["factor"] + keep * plain
