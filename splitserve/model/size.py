"""How much memory a rank's weights take."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from splitserve.model.decoder import Decoder


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of all tensors that a decoder keeps, as they are packed; shared ones count once."""
    tensors = {id(tensor): tensor for tensor in _tensors(decoder)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors within one of our objects, or in a tuple of them."""
    if isinstance(thing, Tensor):
        yield thing
    for part in _parts(thing):
        yield from _tensors(part)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, tuple):
        yield from thing
    elif is_dataclass(thing):
        yield from (getattr(thing, field.name) for field in fields(thing))
    elif type(thing).__module__.startswith("splitserve."):
        yield from vars(thing).values()
