"""Shards: captured conversations on disk, many to a safetensors file, with one Parquet index over all of them.

Axes: T tokens whose state was captured, L captured layers (the aux layers, then the last), H the target's hidden size.
A conversation has T + 1 tokens: its last one was an output and never an input, so the target has no state for it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from raysd.errors import ArtifactError
from raysd.target.checkpoint import FLOATS


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


@dataclass(frozen=True)
class Origin:
    """Whose states a shard holds."""

    target: str
    """The target's fingerprint (raysd/target/locate.py)."""
    layer_ids: tuple[int, ...]
    """Of the captured layers, in the order of axis L."""


SAID = "shard"
"""The one key of a shard's metadata: safetensors writes several in any order, and a shard is to be the same bytes whenever it is captured."""
COLUMNS = ("prompt_id", "topic", "split", "shard", "token_offset", "state_offset", "tokens", "prompt_tokens", "finish_reason")
"""Of the index."""
AGAIN = "the capture's artifact does not belong to this experiment, or is damaged: delete it and run again to capture anew"


def write_shard(path: Path, conversations: Sequence[Conversation], origin: Origin) -> None:
    """Writes one shard: token_ids, loss_mask (1 on answer tokens) and states of all conversations end to end, their table and their origin in the metadata."""
    rows, token_offset, state_offset = [], 0, 0
    for c in conversations:
        rows.append({"prompt_id": c.prompt_id, "topic": c.topic, "split": c.split, "shard": path.name, "token_offset": token_offset,
                     "state_offset": state_offset, "tokens": len(c.token_ids), "prompt_tokens": c.prompt_tokens, "finish_reason": c.finish_reason})
        token_offset += len(c.token_ids)
        state_offset += len(c.states_TLH)
    masks = [(torch.arange(len(c.token_ids)) >= c.prompt_tokens).to(torch.uint8) for c in conversations]
    save_file({"token_ids": torch.cat([c.token_ids for c in conversations]), "loss_mask": torch.cat(masks),
               "states": torch.cat([c.states_TLH for c in conversations])}, path,
              metadata={SAID: json.dumps({**asdict(origin), "conversations": rows})})


def read_rows(path: Path) -> list[dict]:
    """The index rows of one shard. Raises ArtifactError if the file is damaged or not one of ours."""
    with _opened(path) as file:
        return _said(file)["conversations"]


def _said(file: Any) -> dict[str, Any]:
    return json.loads(file.metadata()[SAID])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A shard to read from. Raises ArtifactError, naming it, for whatever goes wrong with it within."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except ArtifactError:
        raise
    except Exception as err:  # safetensors raises a kind of its own that it does not export
        raise ArtifactError(what=f"the shard cannot be read: {err}", where=path, fix="delete it to capture its conversations again") from err


def write_index(folder: Path) -> None:
    """Writes `index.parquet` over all shards of a folder, in their order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row for shard in sorted(folder.glob("shard-*.safetensors")) for row in read_rows(shard)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "index.parquet")


def read_index(folder: Path) -> Any:
    """The index of a capture artifact, a pyarrow table. Raises ArtifactError if it is absent or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "index.parquet"
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as err:
        raise ArtifactError(what=f"the index of the captured states cannot be read: {err}", where=path, fix=AGAIN) from err
    absent = [name for name in COLUMNS if name not in table.column_names]
    if absent:
        raise ArtifactError(what=f"the index of the captured states has no columns {', '.join(absent)}", where=path, fix=AGAIN)
    return table


def check_shards(folder: Path, origin: Origin, hidden_size: int, vocab_size: int) -> None:
    """Raises ArtifactError, naming the file, for a shard that is damaged, is not the one that the index was made of, or holds the states of another target or of
    other layers; and for one whose tensors have other sizes, or token ids that the target does not have, whatever it says of itself.

    Reads headers and token ids, and no states.
    """
    rows = (row for batch in read_index(folder).to_batches() for row in batch.to_pylist())
    for name, listed in itertools.groupby(rows, key=lambda row: row["shard"]):
        _check_shard(folder / name, list(listed), origin, hidden_size, vocab_size)


def _check_shard(path: Path, listed: list[dict], origin: Origin, hidden_size: int, vocab_size: int) -> None:
    def refuse(what: str) -> NoReturn:
        raise ArtifactError(what=what, where=path, fix=AGAIN)

    with _opened(path) as file:
        said = _said(file)
        if said["conversations"] != listed:
            refuse("the shard does not hold the conversations that index.parquet lists of it")
        if said["target"] != origin.target:
            refuse("the shard was captured from another target than the experiment's, or with other settings in `target:`")
        if said["layer_ids"] != list(origin.layer_ids):
            refuse(f"the shard holds the states of the layers {said['layer_ids']}, the draft reads {list(origin.layer_ids)}")
        tokens = sum(row["tokens"] for row in listed)
        for name, dtypes, shape in (("token_ids", ("I64",), [tokens]), ("states", FLOATS, [tokens - len(listed), len(origin.layer_ids), hidden_size])):
            part = file.get_slice(name)
            if part.get_dtype() not in dtypes or part.get_shape() != shape:
                refuse(f"the shard's {name} are {part.get_dtype()} {part.get_shape()}, not {' or '.join(dtypes)} {shape}")
        smallest, largest = file.get_tensor("token_ids").aminmax()
        if smallest < 0 or largest >= vocab_size:
            refuse(f"the shard's token ids are from {smallest} to {largest}, the target's vocabulary has {vocab_size}")


class Captured(Sequence[Conversation]):
    """Read access to a capture artifact that `check_shards` finds good: conversations of one split, each read when it is asked for, and no file held open,
    so that memory does not grow with the data.

    Those whose answer is a single token are left out: there is nothing in them that a draft could propose.
    """

    def __init__(self, folder: Path, split: str, truncated: bool = True) -> None:
        """truncated: whether to take answers that were cut off, too."""
        import pyarrow.compute as pc

        self.folder = folder
        table = read_index(folder)
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
                    with _opened(self.folder / shard) as file:
                        token_ids = file.get_tensor("token_ids")
                yield token_ids[row["token_offset"]:row["token_offset"] + row["tokens"]], row["prompt_tokens"]

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(index)
        (row,) = self._table.slice(index, 1).to_pylist()
        with _opened(self.folder / row["shard"]) as file:
            token_ids = file.get_slice("token_ids")[row["token_offset"]:row["token_offset"] + row["tokens"]]
            states = file.get_slice("states")[row["state_offset"]:row["state_offset"] + row["tokens"] - 1]
        return Conversation(row["prompt_id"], row["topic"], row["split"], token_ids, row["prompt_tokens"], row["finish_reason"], states)
