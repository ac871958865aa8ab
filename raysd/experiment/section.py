"""What all sections share: closed, frozen, and each field marked by whether it changes the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict


class PlacementMark:
    """Marks a field that says where or how fast something runs and never what comes out, not in the last digit; or a name, such as a path, whose
    content enters fingerprints in its place."""


Value = TypeVar("Value")
Placement = Annotated[Value, PlacementMark()]
"""`max_failures: Placement[int] = 3` keeps the field out of every fingerprint."""


class Section(BaseModel):
    """One section of an experiment file: unknown keys are refused, values cannot change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False, validate_default=True)

    def result_values(self) -> dict[str, Any]:
        """The values that change the result, JSON-ready, for a fingerprint: all fields but Placement ones, nested sections likewise."""
        values = {}
        for name, field in type(self).model_fields.items():
            if any(isinstance(mark, PlacementMark) for mark in field.metadata):
                continue
            values[name] = _result_value(getattr(self, name))
        return values


def _result_value(value: Any) -> Any:
    if isinstance(value, Section):
        return value.result_values()
    if isinstance(value, (list, tuple)):
        return [_result_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _result_value(item) for key, item in value.items()}
    if isinstance(value, Path):
        raise TypeError(f"a path ({value}) must not be part of a fingerprint: mark the field as Placement")
    return value
