"""The block size of a KV cache that the attention of the target and of the draft must share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from raysd.checks.attention import Platform

TABLE = Path(__file__).parent / "kv_block_sizes.yaml"
DEFAULT_BLOCK = 16
"""Tokens of a block unless said otherwise and every backend takes it (vllm/config/cache.py)."""
CPU_DEFAULT_BLOCK, CPU_MLA_BLOCK = 128, 16
"""Of vLLM's CPU build, and what it sets for CPU_MLA whatever is asked for (vllm/platforms/cpu.py)."""


@dataclass(frozen=True)
class MultipleOf:
    """Every multiple of a size, as vLLM's class of this name."""

    base: int

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


Size = int | MultipleOf


class NotTold(Exception):
    """Something that a check needs is known neither to the installed vLLM nor to our tables; the text says what."""


@dataclass(frozen=True)
class SharedBlock:
    """What comes of one KV cache for several backends."""

    size: int | None
    """Tokens of a block that every backend's kernels take; None: there is no such size, and vLLM does not start."""
    words: str
    """vLLM's words if there is none, else empty."""


class BlockSizes(Protocol):
    """Who knows the block sizes of backends: the installed vLLM, or the table."""

    def kernel_block_sizes(self, backend: str) -> tuple[Size, ...]:
        """What a backend's kernels take. Raises NotTold."""

    def shared_block(self, manager_block: int, backends: Sequence[str]) -> SharedBlock:
        """What vLLM's `select_common_block_size` says of the cache's block size and these backends. Raises NotTold."""


@dataclass(frozen=True)
class TabledSizes:
    """The block sizes of a release that is not installed (a BlockSizes)."""

    vllm: Version

    def kernel_block_sizes(self, backend: str) -> tuple[Size, ...]:
        known = [(Version(entry["since"]), entry["sizes"]) for entry in _table().get(backend, ())]
        fitting = [sizes for since, sizes in known if since <= Version(self.vllm.base_version)]
        if not fitting:
            since = f" before {known[0][0]}" if known else ""
            raise NotTold(f"which KV block sizes {backend} takes in vLLM {self.vllm}: raysd's table does not say{since}")
        return tuple(MultipleOf(int(size[:-1])) if isinstance(size, str) else size for size in fitting[-1])

    def shared_block(self, manager_block: int, backends: Sequence[str]) -> SharedBlock:
        sizes = {backend: self.kernel_block_sizes(backend) for backend in backends}
        # The rule of vllm/v1/worker/utils.py: the manager's size if all take it, else the largest size named by one that divides it and that all take.
        named = {size for own in sizes.values() for size in own if isinstance(size, int) and manager_block % size == 0}
        for size in (manager_block, *sorted(named, reverse=True)):
            if all(takes(own, size) for own in sizes.values()):
                return SharedBlock(size, "")
        return SharedBlock(None, f"No common block size for {manager_block} ({'; '.join(f'{name}: {list(own)}' for name, own in sizes.items())}).")


def takes(sizes: Iterable[Size], block: int) -> bool:
    """Whether a backend takes a block size."""
    return any(block == size if isinstance(size, int) else block % size.base == 0 for size in sizes)


def manager_block(platform: Platform, backends: Sequence[str], asked: int | None, known: BlockSizes) -> int:
    """Tokens of a block of the cache. asked: the experiment's `block-size`. Raises NotTold.

    Unasked, vLLM takes 16 if all backends do, else the smallest size that suits all; where none does, it is what the target alone would get.
    """
    if platform == "cpu":
        return CPU_MLA_BLOCK if "CPU_MLA" in backends else asked or CPU_DEFAULT_BLOCK
    if asked is not None:
        return asked
    sizes = [known.kernel_block_sizes(backend) for backend in backends]
    bases = [[size if isinstance(size, int) else size.base for size in own] for own in sizes]
    candidates = [DEFAULT_BLOCK, *sorted({math.lcm(*each) for each in itertools.product(*bases)})]
    alone = DEFAULT_BLOCK if takes(sizes[0], DEFAULT_BLOCK) else min(bases[0])
    return next((block for block in candidates if all(takes(own, block) for own in sizes)), alone)


def shared_block(platform: Platform, backends: Sequence[str], asked: int | None, known: BlockSizes) -> SharedBlock:
    """Whether one cache suits all backends. Raises NotTold."""
    backends = list(dict.fromkeys(backends))
    return known.shared_block(manager_block(platform, backends, asked, known), backends)


def suiting(platform: Platform, target: Sequence[str], candidates: Sequence[str], asked: int | None, known: BlockSizes) -> list[str]:
    """Of the draft's possible backends those that share a cache with the target's."""

    def suits(backend: str) -> bool:
        try:
            return shared_block(platform, (*target, backend), asked, known).size is not None
        except NotTold:
            return False  # only what is known to work is named

    return [backend for backend in candidates if suits(backend)]


@cache
def _table() -> Mapping[str, list[dict]]:
    import yaml

    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))
