"""Shards: captured conversations on disk, many to a safetensors file, with one Parquet index over all of them.

Axes: T tokens whose state was captured, L captured layers (the aux layers, then the last), H the target's hidden size.
A conversation has T + 1 tokens: its last one was an output and never an input, so the target has no state for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from raysd.errors import ArtifactError


@dataclass(frozen=True)
class Conversation:
    """One prompt and the target's answer, with the states of one pass."""

    prompt_id: str
    topic: str
    split: str
    token_ids: torch.Tensor
    """int64 [T + 1], prompt then answer."""
    prompt_tokens: int
    """How many of the tokens are the prompt's; the rest, the answer, is what the draft learns."""
    finish_reason: str
    """`stop` or `length`, as vLLM says it."""
    states_TLH: torch.Tensor
    """The target's dtype [T, L, H], un-normed residual streams."""


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Writes one shard: token_ids, loss_mask (1 on answer tokens) and states of all conversations end to end, their table in the metadata."""
    rows, token_offset, state_offset = [], 0, 0
    for c in conversations:
        rows.append({"prompt_id": c.prompt_id, "topic": c.topic, "split": c.split, "shard": path.name, "token_offset": token_offset,
                     "state_offset": state_offset, "tokens": len(c.token_ids), "prompt_tokens": c.prompt_tokens, "finish_reason": c.finish_reason})
        token_offset += len(c.token_ids)
        state_offset += len(c.states_TLH)
    masks = [(torch.arange(len(c.token_ids)) >= c.prompt_tokens).to(torch.uint8) for c in conversations]
    save_file({"token_ids": torch.cat([c.token_ids for c in conversations]), "loss_mask": torch.cat(masks),
               "states": torch.cat([c.states_TLH for c in conversations])}, path, metadata={"conversations": json.dumps(rows)})


def read_rows(path: Path) -> list[dict]:
    """The index rows of one shard. Raises ArtifactError if the file is damaged or not one of ours."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["conversations"])
    except Exception as err:  # safetensors raises a kind of its own that it does not export
        raise ArtifactError(what=f"the shard cannot be read: {err}", where=path, fix="delete it to capture its conversations again") from err


def write_index(folder: Path) -> None:
    """Writes `index.parquet` over all shards of a folder, in their order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row for shard in sorted(folder.glob("shard-*.safetensors")) for row in read_rows(shard)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "index.parquet")


class Captured(Sequence[Conversation]):
    """Read access to a capture artifact: conversations of one split, each read when it is asked for, and no file held open, so that memory does not grow
    with the data.

    Those whose answer is a single token are left out: there is nothing in them that a draft could propose.
    """

    def __init__(self, folder: Path, split: str, truncated: bool = True) -> None:
        """truncated: whether to take answers that were cut off, too."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self.folder = folder
        table = pq.read_table(folder / "index.parquet")
        wanted = pc.and_(pc.equal(table["split"], split), pc.greater_equal(pc.subtract(table["tokens"], table["prompt_tokens"]), 2))
        if not truncated:
            wanted = pc.and_(wanted, pc.not_equal(table["finish_reason"], "length"))
        self._table = table.filter(wanted)

    def __len__(self) -> int:
        return self._table.num_rows

    def tokens(self, index: int) -> int:
        """How many tokens a conversation has."""
        return self._table["tokens"][index].as_py()

    def token_ids(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Token ids [T + 1] and prompt length of every conversation, without its states."""
        shard, token_ids = None, None
        for batch in self._table.to_batches():
            for row in batch.to_pylist():
                if row["shard"] != shard:
                    shard = row["shard"]
                    with safe_open(self.folder / shard, "pt") as file:
                        token_ids = file.get_tensor("token_ids")
                yield token_ids[row["token_offset"]:row["token_offset"] + row["tokens"]], row["prompt_tokens"]

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(index)
        (row,) = self._table.slice(index, 1).to_pylist()
        with safe_open(self.folder / row["shard"], "pt") as file:
            token_ids = file.get_slice("token_ids")[row["token_offset"]:row["token_offset"] + row["tokens"]]
            states = file.get_slice("states")[row["state_offset"]:row["state_offset"] + row["tokens"] - 1]
        return Conversation(row["prompt_id"], row["topic"], row["split"], token_ids, row["prompt_tokens"], row["finish_reason"], states)
