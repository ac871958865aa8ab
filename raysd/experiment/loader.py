"""Reads an experiment file into an `Experiment`, with paths made absolute and errors that name file and field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from raysd.errors import ExperimentError
from raysd.experiment.experiment import Experiment
from raysd.experiment.prompts import HUB_PREFIX


def load_experiment(path: Path | str) -> Experiment:
    """The experiment in a YAML file. Relative paths in it are taken from the file's own folder.

    Raises ExperimentError (exit 64) for a missing or unreadable file, a file that is no YAML mapping, an unknown key,
    a wrong type, a value out of range, or sections that contradict each other.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ExperimentError(what="the experiment file is not UTF-8 text", where=path, fix="save it as UTF-8 YAML") from err
    except (OSError, ValueError) as err:  # ValueError: a NUL in the path
        raise ExperimentError(
            what=f"the experiment file cannot be read: {getattr(err, 'strerror', None) or err}", where=path, fix="check the path; `jobs/` holds ready experiments"
        ) from err
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as err:  # ValueError: a date that does not exist, such as 2026-13-45
        raise ExperimentError(
            what=f"the experiment file is not valid YAML: {_one_line(err)}", where=path, fix="correct the YAML at the line named"
        ) from err
    if not isinstance(document, dict):
        raise ExperimentError(
            what=f"the experiment file holds {type(document).__name__}, not a mapping of sections",
            where=path,
            fix="start it with `name:`; `jobs/smollm2-cpu.yaml` is an example",
        )
    return _absolute_paths(_validated(document, path), path)


def dump_experiment(experiment: Experiment) -> str:
    """The resolved experiment as YAML, every default written out; `load_experiment` reads it back equal."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validated(document: dict[str, Any], path: Path) -> Experiment:
    try:
        # By way of JSON, where pydantic's strict mode still reads paths from text, and no longer "100" or true as a number.
        return Experiment.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as err:
        problems = [_explained(problem) for problem in err.errors()]
        field, what, fix = problems[0]
        more = "".join(
            f"\n  also:  {other_field}: {other_what}" if other_field else f"\n  also:  {other_what}"
            for other_field, other_what, _ in problems[1:]
        )
        raise ExperimentError(what=what + more, where=f"{path}: {field}" if field else path, fix=fix) from None


def _explained(problem: dict[str, Any]) -> tuple[str, str, str]:
    """Field, what is wrong, and what to do, for one of pydantic's problems."""
    location = [str(part) for part in problem["loc"] if part != "[key]"]  # pydantic's word for a key of a mapping
    field = ".".join(location)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        allowed = _fields_at(location[:-1])
        return field, f"unknown key `{location[-1]}`", f"remove it, or use one of: {', '.join(allowed)}"
    if problem["type"] == "missing":
        return field, "is missing", f"add `{location[-1]}:`"
    if problem["type"] == "value_error":
        head, _, rest = message.partition(": ")
        if rest and head.replace(".", "").replace("_", "").isalnum():
            return ".".join([*location, head]), rest, "change one of the fields named"
        return field, message, "change the value"
    shown = repr(problem.get("input"))
    return field, f"{shown if len(shown) < 80 else shown[:77] + '...'}: {message[0].lower() + message[1:]}", "change the value"


def _fields_at(location: list[str]) -> list[str]:
    """Names of the fields that the section at a location may hold."""
    from typing import get_args

    from raysd.experiment.section import Section

    section: Any = Experiment
    for part in location:
        field = section.model_fields.get(part) if isinstance(section, type) and issubclass(section, Section) else None
        if field is None:
            continue  # an index into a list, or a key of a mapping: the section stays the one found last
        section = _section_in(field.annotation, get_args) or section
    return list(section.model_fields)


def _section_in(annotation: Any, get_args: Any) -> Any:
    from raysd.experiment.section import Section

    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part, get_args))), None)


def _absolute_paths(experiment: Experiment, path: Path) -> Experiment:
    """The experiment with every path absolute, so that it means the same in a Ray job's working directory; path: its file."""
    folder = path.resolve().parent

    def absolute(value: Path | None, field: str) -> Path | None:
        if value is None or str(value).startswith(HUB_PREFIX):
            return value
        try:
            return (folder / value.expanduser()).resolve()
        except (RuntimeError, ValueError, OSError) as err:  # a user that does not exist, a link to itself, a NUL
            raise ExperimentError(what=f"{str(value)[:80]!r} is not a usable path: {err}", where=f"{path}: {field}", fix="correct the path") from err

    target = experiment.target
    model = target.model
    if not model.startswith("pypi:") and (model.startswith((".", "/", "~")) or os.path.isdir(folder / model)):
        model = str(absolute(Path(model), "target.model"))
    if target.revision is not None and model.startswith(("pypi:", "/")):
        raise ExperimentError(what=f"a revision has no effect on {target.model}, which is not a Hugging Face id", where=f"{path}: target.revision", fix="remove it")
    return experiment.model_copy(
        update={
            "store": experiment.store if experiment.store.startswith("s3:") else str(absolute(Path(experiment.store), "store")),
            "target": target.model_copy(update={"model": model, "chat_template": absolute(target.chat_template, "target.chat_template")}),
            "prompts": experiment.prompts.model_copy(update={"path": absolute(experiment.prompts.path, "prompts.path")}),
            "sweep": experiment.sweep.model_copy(update={"workloads": [
                workload.model_copy(update={"prompts": absolute(workload.prompts, f"sweep.workloads.{index}.prompts")})
                for index, workload in enumerate(experiment.sweep.workloads)]}),
            "draft": experiment.draft.model_copy(update={"checkpoint": absolute(experiment.draft.checkpoint, "draft.checkpoint")}),
        }
    )


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice, and reads 1e-3 as a number as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key}` is there twice", key_node.start_mark)
            if isinstance(key, (str, int)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _float_resolver() -> None:
    import re

    # PyYAML follows YAML 1.1, where 1e-3 is a string: a learning rate would arrive as text.
    _StrictLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)$"),
        list("-+0123456789."),
    )


_float_resolver()


def _one_line(err: Exception) -> str:
    return " ".join(str(err).split())
