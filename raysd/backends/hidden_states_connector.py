"""A vLLM KV connector that writes the hidden states of finished requests to files. Platform neutral: no CUDA call.

vLLM's `extract_hidden_states` method (pull request 33736) keeps the states of chosen layers in a paged cache beside the KV cache, as if they were
the KV of a dummy draft. When a request ends, the scheduler side hands its block ids over, and the worker side copies those blocks out.
vLLM's own ExampleHiddenStatesConnector does this with CUDA streams and pinned memory, and dies on CPU; this one copies plainly.

A file appears under its name only when it is whole, so a reader waits for the name. vLLM loads this module by `kv_connector_module_path`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank


@dataclass
class FinishedRequest:
    request_id: str
    path: str
    tokens: int
    block_ids: list[int]


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """From the scheduler side to the worker side, with one step's work."""

    requests: list[FinishedRequest] = field(default_factory=list)


class RaysdHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores, never loads. Extra configuration: `folder`, where the files go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._folder = self._kv_transfer_config.get_from_extra_config("folder", None)
        if not self._folder:
            raise ValueError("kv_connector_extra_config needs `folder`")
        self._group = _hidden_state_group(kv_cache_config)
        self._finished: list[FinishedRequest] = []
        self._cache: torch.Tensor | None = None
        self._writes = True

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks (True) until `get_finished` reports the request, and tells the client where the file will be."""
        if self._group >= len(block_ids) or not block_ids[self._group]:
            return False, None  # it was never scheduled
        tokens = len(request.all_token_ids) - 1  # the last token was an output, never an input: it has no state
        path = os.path.join(self._folder, f"{request.request_id}.safetensors")
        self._finished.append(FinishedRequest(request.request_id, path, tokens, list(block_ids[self._group])))
        return True, {"hidden_states_path": path}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = FinishedRequests(self._finished)
        self._finished = []
        return metadata

    def get_finished_count(self) -> int:
        return 1  # one tensor-parallel rank writes; waiting for all of them would never free the blocks

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        (name,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self._cache = kv_caches[name]  # [blocks, layers, tokens of a block, hidden size], whatever the layout in memory
        self._writes = get_tensor_model_parallel_rank() == 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the dummy draft's layer has cached the states by itself

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Writes what the scheduler side handed over; returns the ids whose blocks may be freed."""
        if not self._writes or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        written = set()
        for request in metadata.requests:
            # [blocks, layers, block, H] -> [tokens, layers, H]
            states = self._cache[request.block_ids].transpose(1, 2).flatten(0, 1)[:request.tokens].contiguous().cpu()
            save_file({"states": states}, f"{request.path}.part")
            os.replace(f"{request.path}.part", request.path)
            written.add(request.request_id)
        return written or None, None


def _hidden_state_group(kv_cache_config: Any) -> int:
    """Index of the KV cache group that holds hidden states."""
    if kv_cache_config is None:
        return 0
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = [i for i, group in enumerate(kv_cache_config.kv_cache_groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(groups) == 1:
        return groups[0]
    if not groups and len(kv_cache_config.kv_cache_groups) == 1:
        return 0
    raise ValueError(f"{len(groups)} KV cache groups hold hidden states among {len(kv_cache_config.kv_cache_groups)}; exactly one must")
