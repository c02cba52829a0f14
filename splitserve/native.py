"""The native kernels, where they were built; without them torch and numpy do the same, slower.

`kernels/` holds their sources and `setup.py` builds them. What they compute, and for which data
types, is said where they are used: in `splitserve.model` and `splitserve.transfer.copy`.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SWITCH = "SPLITSERVE_NATIVE"
"""Environment variable; ``0`` keeps the kernels out, the path of a library takes that one."""

TILE_DEPTH = 32
"""Inputs that a bfloat16 product takes at once; kernels.h says the same."""

HEAD_DIM_STEP = 16
MAX_HEAD_DIM = 256
"""Head sizes that attention is compiled for; kernels.h says the same."""


def library() -> Path:
    """Where the library is if it was built for this torch: others' symbols may differ."""
    version = torch.__version__.split("+")[0]
    return Path(__file__).with_name(f"native-torch-{version}.so")


def _load() -> bool:
    switch = os.environ.get(SWITCH, "")
    path = Path(switch) if switch not in ("", "0") else library()
    if switch == "0" or not path.is_file():
        return False
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        log.warning("native kernels cannot be loaded", extra={"error": str(error)})
        return False
    return True


ops: Any = torch.ops.splitserve
"""The operators; there only if `available`."""

available = _load()

_COMPUTED = {torch.float32}
if available and ops.multiplies_bfloat16():
    _COMPUTED.add(torch.bfloat16)


def description() -> str:
    """What a model's steps run on, for example ``"native avx2"``."""
    if not available:
        return "plain torch"
    return f"native {ops.instruction_set()}" + (" amx" if ops.multiplies_bfloat16() else "")


def computes(dtype: torch.dtype) -> bool:
    """Whether there are kernels for linear layers and what lies between them."""
    return available and dtype in _COMPUTED


def multiplies(dtype: torch.dtype, inputs: int) -> bool:
    """Whether there is a kernel for a linear layer with so many inputs."""
    return computes(dtype) and (dtype is torch.float32 or inputs % TILE_DEPTH == 0)


def attends(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for decode attention."""
    return (
        available
        and dtype in (torch.float32, torch.bfloat16)
        and head_dim % HEAD_DIM_STEP == 0
        and head_dim <= MAX_HEAD_DIM
    )
