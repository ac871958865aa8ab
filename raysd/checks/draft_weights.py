"""A finished draft's tensors: whether all that vLLM loads are there in the shapes that config.json says, and whether its vocabulary is the target's.

vLLM 0.32 says nothing about a tensor that is absent from a draft: it drafts with what happened to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysd.checks.draft_config import Family, count, read_json, refuse, unreadable
from raysd.target.shape import TargetShape

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
UNREAD = ("t2d", "mask_hidden", "rotary_emb.")
"""In the names of tensors that vLLM passes over."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the draft: those of its index, if it has one. Raises ExperimentError if there are none."""
    if (folder / INDEX).is_file():
        files = read_json(folder, INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) and Path(name).name == name and (folder / name).is_file() for name in files.values()):
            raise unreadable(folder / INDEX, "names weight files that are not beside it")
        return [folder / name for name in sorted(set(files.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise unreadable(folder / "config.json", "has no safetensors file beside it")
    return files


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor, by `plain_name`. Raises ExperimentError if a file is not whole, or if a tensor is there twice."""
    shapes: dict[str, list[int]] = {}
    for file in _opened(folder):
        for name in file.keys():  # noqa: SIM118 (no iterator)
            if plain_name(name) in shapes:
                refuse(folder, f"its weights hold {plain_name(name)} twice")
            shapes[plain_name(name)] = file.get_slice(name).get_shape()
    return shapes


def plain_name(name: str) -> str:
    """A tensor's name without what trainers differ in: `model.` in front, `midlayer.` for the first layer."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def check_shapes(folder: Path, config: dict[str, Any], family: Family, aux_count: int, target: TargetShape) -> None:
    """Raises ExperimentError for a tensor that is missing, has another shape than the config and the target say, or that vLLM has no place for.

    aux_count: how many hidden states `fc` reads; 0: there is no `fc`.
    """
    found, wanted = read_shapes(folder), _layers(folder, config, family)
    width, rows = count(folder, config, "hidden_size"), _rows(folder, config, target)
    reads = count(folder, config, "target_hidden_size", width)
    if aux_count:
        wanted["fc.weight"] = [width, aux_count * reads]
        if config.get("fc_norm"):
            wanted |= {f"fc_norm.{index}.weight": [reads] for index in range(aux_count)}
        if family != "mla" and (config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc")):
            wanted["input_norm.weight"] = [aux_count * reads]
    wanted["norm.weight"] = [width]
    if rows != target.vocab_size or width != target.hidden_size or "lm_head.weight" in found:  # otherwise vLLM shares the target's
        wanted["lm_head.weight"] = [rows, width]
    if width != target.hidden_size or "embed_tokens.weight" in found:
        wanted["embed_tokens.weight"] = [target.vocab_size, width]
    if rows != target.vocab_size or "d2t" in found:
        wanted["d2t"] = [rows]
    if "t2d" in found:
        wanted["t2d"] = [target.vocab_size]
    for name, shape in wanted.items():
        if name not in found:
            refuse(folder, f"its weights hold no {name}, and vLLM would draft without it")
        if found[name] != shape:
            refuse(folder, f"its {name.removesuffix('.weight')} is {found[name]}, not {shape}")
    modules = {name.rpartition(".")[0] for name in wanted} | {"input_norm", *([] if aux_count else ["fc"]), *(f"layers.{i}.hidden_norm" for i in range(count(folder, config, "num_hidden_layers")))}
    homeless = [name for name in found if name not in wanted and name.rpartition(".")[0] not in modules and not any(part in name for part in UNREAD)]
    if homeless and not config.get("quantization_config"):
        refuse(folder, f"its weights hold {', '.join(sorted(homeless)[:4])}, for which vLLM has no place in a draft of this config.json "
                       f"(num_hidden_layers = {config['num_hidden_layers']})")


def check_vocabulary(folder: Path, target: TargetShape) -> bool:
    """Whether the draft proposes every token of the target, token i at row i, though it holds a `d2t`, which vLLM 0.32 refuses beside a whole vocabulary.

    d2t: int [rows], target token minus row. t2d: bool [target vocabulary], true for the target tokens of d2t. Raises ExperimentError if they are anything else.
    """
    import numpy as np  # late: `raysd plan` loads it only beside a finished draft

    tensors: dict[str, np.ndarray] = {}
    for file in _opened(folder):
        tensors |= {plain_name(name): file.get_tensor(name) for name in file.keys() if plain_name(name) in ("d2t", "t2d")}  # noqa: SIM118
    offsets, mask = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return False
    if offsets.dtype.kind not in "iu":
        refuse(folder, f"its d2t is of {offsets.dtype}, not of whole numbers")
    offsets = offsets.astype(np.int64)
    tokens = offsets + np.arange(len(offsets))
    if not _are_tokens(tokens, target):
        absolute = _are_tokens(offsets, target)
        refuse(folder, "its d2t holds the target's token ids, where vLLM expects offsets: token id minus row" if absolute
               else f"its d2t leads to tokens that do not ascend within the target's {target.vocab_size}",
               "write d2t as `token ids - arange(rows)`" if absolute else "correct the draft's d2t")
    if mask is not None and not np.array_equal(np.flatnonzero(mask), tokens):
        absolute = np.array_equal(np.flatnonzero(mask), offsets)
        refuse(folder, "its d2t holds the target's token ids, where vLLM expects offsets: token id minus row" if absolute
               else "its t2d marks other tokens than its d2t leads to", "write d2t as `token ids - arange(rows)`, token ids where t2d is true, ascending")
    return len(offsets) == target.vocab_size


def _are_tokens(ids: np.ndarray, target: TargetShape) -> bool:
    return bool(len(ids) and ids[0] >= 0 and ids[-1] < target.vocab_size and (ids[1:] > ids[:-1]).all())


def _rows(folder: Path, config: dict[str, Any], target: TargetShape) -> int:
    rows = count(folder, config, "draft_vocab_size", target.vocab_size)
    if rows > target.vocab_size:
        refuse(folder, f"its draft_vocab_size is {rows}, above the target's {target.vocab_size}")
    return rows


def _layers(folder: Path, config: dict[str, Any], family: Family) -> dict[str, list[int]]:
    """Shapes of the decoder layers' weights, by plain name. Only the first reads the token's embedding beside the features."""
    width, inner = count(folder, config, "hidden_size"), count(folder, config, "intermediate_size")
    shapes: dict[str, list[int]] = {}
    for index in range(count(folder, config, "num_hidden_layers")):
        reads = 2 * width if index == 0 else width
        attention = _latent_attention(folder, config, reads, width) if family == "mla" else _attention(folder, config, family, reads, width)
        shapes |= {f"layers.{index}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"layers.{index}.mlp.{name}_proj.weight": shape for name, shape in (("gate", [inner, width]), ("up", [inner, width]), ("down", [width, inner]))}
        norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if index == 0 else [])
        shapes |= {f"layers.{index}.{name}.weight": [width] for name in norms}
    return shapes


def _attention(folder: Path, config: dict[str, Any], family: Family, reads: int, width: int) -> dict[str, list[int]]:
    heads = count(folder, config, "num_attention_heads")
    head = count(folder, config, "head_dim", 128 if family == "qwen3" else width // heads)  # the defaults of transformers' configs
    kv_heads = count(folder, config, "num_key_value_heads", 32 if family == "qwen3" else heads)
    shapes = {"q_proj": [heads * head, reads], "k_proj": [kv_heads * head, reads], "v_proj": [kv_heads * head, reads], "o_proj": [width, heads * head]}
    return shapes | ({"q_norm": [head], "k_norm": [head]} if family == "qwen3" else {})


def _latent_attention(folder: Path, config: dict[str, Any], reads: int, width: int) -> dict[str, list[int]]:
    heads, rank = count(folder, config, "num_attention_heads"), count(folder, config, "kv_lora_rank")
    plain, rotated, value = (count(folder, config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes = {"kv_a_proj_with_mqa": [rank + rotated, reads], "kv_a_layernorm": [rank], "kv_b_proj": [heads * (plain + value), rank], "o_proj": [width, heads * value]}
    if config.get("q_lora_rank") is None:
        return shapes | {"q_proj": [heads * (plain + rotated), reads]}
    queries = count(folder, config, "q_lora_rank")
    return shapes | {"q_a_proj": [queries, reads], "q_a_layernorm": [queries], "q_b_proj": [heads * (plain + rotated), queries]}


def _opened(folder: Path) -> Iterator[Any]:
    """The draft's files, each open while it is the caller's turn. Raises ExperimentError if one is not whole."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            file = safe_open(path, "np")
        except (SafetensorError, OSError) as err:
            raise unreadable(path, f"cannot be read: {err}") from err
        with file:
            yield file
