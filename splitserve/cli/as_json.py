"""Results as JSON, for programs that call the command."""

import json
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def as_json(value: "DataclassInstance", *, indent: int | None = None) -> str:
    """A dataclass by its fields' names; enumerations by theirs."""
    return json.dumps(asdict(value), default=_name, indent=indent)


def _name(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"{type(value).__name__} has no JSON form")
