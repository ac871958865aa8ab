"""The processes that share a training: what they must add up, agree on or hold in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import distributed, nn

Value = TypeVar("Value")


class Workers(Protocol):
    """All of them call the same methods in the same order."""

    rank: int
    """This one's number, from 0."""
    count: int
    beside: int
    """How many of them are on this machine, this one included."""
    device: torch.device

    def join(self, draft: nn.Module) -> None:
        """Gives every worker the first one's weights. To be called before the optimiser is made: the draft's parameters may be others afterwards."""

    def whole(self, draft: nn.Module) -> AbstractContextManager[None]:
        """Within, the draft computes: its parameters are whole."""

    def summing_gradients(self, draft: nn.Module) -> AbstractContextManager[None]:
        """As `whole`. What is set within as `.grad` of the parameters is at the end the sum over all workers, where the optimiser looks for it."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all workers, the same at each of them."""

    def gather(self, value: Value) -> list[Value]:
        """What each of them passes, by rank, the same at each of them. Slow: for what ends a training."""

    def first_says(self, value: bool) -> bool:
        """What the worker of rank 0 passes: for what its clock decides."""

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a parameter, or of what the optimiser knows of one, of which this worker may hold a part. For a checkpoint: the first worker's alone counts."""

    def mine_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse: what this worker holds of it."""


class Alone:
    """One worker, the stage's own process."""

    rank, count, beside = 0, 1, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def join(self, draft: nn.Module) -> None:
        pass

    def whole(self, draft: nn.Module) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def summing_gradients(self, draft: nn.Module) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def first_says(self, value: bool) -> bool:
        return value

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def mine_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Together:
    """The workers of torch's default process group, which somebody has set up. Each has all of the draft (DDP)."""

    def __init__(self, device: torch.device, beside: int) -> None:
        self.device, self.beside = device, beside
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def join(self, draft: nn.Module) -> None:
        with torch.no_grad():
            for parameter in draft.parameters():
                distributed.broadcast(parameter, 0)

    def whole(self, draft: nn.Module) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def summing_gradients(self, draft: nn.Module) -> Iterator[None]:
        yield
        # One message: a draft has a dozen tensors, most of them small.
        gradients = [parameter.grad for parameter in draft.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Value) -> list[Value]:
        values = [value] * self.count
        distributed.all_gather_object(values, value)
        return values

    def first_says(self, value: bool) -> bool:
        word = torch.tensor([int(value)], device=self.device)
        distributed.broadcast(word, 0)
        return bool(word.item())

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def mine_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Sharing(Together):
    """Each worker holds a share of every weight and of its moments (FSDP2), by rows, and the draft is put together while it computes.

    A draft is one layer, so it is put together once in a step, and the gradients are summed and shared out once at its end: FSDP's own hooks expect one
    forward pass for each backward pass, and a step of ours has one for every draft step.
    """

    def __init__(self, device: torch.device, beside: int) -> None:
        super().__init__(device, beside)
        self._mesh = distributed.init_device_mesh(device.type, (self.count,))

    def join(self, draft: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        super().join(draft)
        fully_shard(draft, mesh=self._mesh)

    @contextlib.contextmanager
    def whole(self, draft: nn.Module) -> Iterator[None]:
        draft.unshard()
        yield
        draft.reshard()

    @contextlib.contextmanager
    def summing_gradients(self, draft: nn.Module) -> Iterator[None]:
        from torch.distributed.tensor import DTensor, Partial, Shard

        with self.whole(draft):
            yield
            totals = []
            for parameter in draft.parameters():
                totals.append(DTensor.from_local(parameter.grad, self._mesh, [Partial()], run_check=False).redistribute(self._mesh, [Shard(0)]))
                parameter.grad = None
        for parameter, total in zip(draft.parameters(), totals, strict=True):
            parameter.grad = total

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        whole = tensor.detach().full_tensor()
        return whole.cpu() if self.rank == 0 else whole.new_empty(0)

    def mine_of(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import Shard, distribute_tensor

        # A number, as of AdamW's steps, is everybody's. src_data_rank: everybody has read the same checkpoint, so nothing is sent.
        return tensor if tensor.ndim == 0 else distribute_tensor(tensor, self._mesh, [Shard(0)], src_data_rank=None)
