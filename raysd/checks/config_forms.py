"""Whether a config.json is built as such files are: checks then take it apart without asking of each part what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysd.errors import ExperimentError

OBJECTS = ("text_config", "transformer_layer_config", "eagle_config", "quantization_config", "global_quant_config", "config_groups", "weights", "export")
LISTS = ("architectures", "exclude", "ignore", "modules_to_not_convert", "ignored_layers")
"""Lists of names."""
COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "group_size")
BLOCKS = ("weight_block_size",)


def check_forms(config: Mapping[str, Any], where: str) -> None:
    """Raises ExperimentError, naming the key, if a part of the config has another form than its name says; what is null or absent is left to those who need it."""
    for path, value, form in _wrong(config, ""):
        raise ExperimentError(what=f"its config.json has {path} = {value!r:.60}, not {form}", where=where, fix="correct it in a copy of the folder")


def _wrong(config: Mapping[str, Any], inside: str):
    """Place, value and what should be there, of everything of a wrong form."""
    for name, value in config.items():
        path = f"{inside}{name}"
        if value is None:
            continue
        if name in OBJECTS and not isinstance(value, dict):
            yield path, value, "an object"
        elif name in LISTS and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            yield path, value, "a list of names"
        elif name in COUNTS and not (type(value) is int and (value > 0 or name == "group_size")):  # a group of -1 is a whole row
            yield path, value, "a count"
        elif name in BLOCKS and not (isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)):
            yield path, value, "two counts"
        elif name == "weight" and not isinstance(value, dict) and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            yield path, value, "an object, or a list of them"
        elif name == "config_groups" and not all(isinstance(group, dict) for group in value.values()):
            yield path, value, "an object of objects"
        elif isinstance(value, dict):
            yield from _wrong(value, f"{path}.")
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict):
                    yield from _wrong(each, f"{path}.")
