"""splitserve: large language models with prefill and decode on separate daemons.

The names below load on first use, so that a worker that needs only ``splitserve.core``
never pays for gRPC, and the router never for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.client import AsyncClient, Client, Delta
    from splitserve.core.errors import SplitserveError
    from splitserve.core.sampling import SamplingParams
    from splitserve.local import LocalCluster

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Delta", "LocalCluster", "SamplingParams", "SplitserveError"]

_HOMES = {
    "AsyncClient": "splitserve.client",
    "Client": "splitserve.client",
    "Delta": "splitserve.client",
    "LocalCluster": "splitserve.local",
    "SamplingParams": "splitserve.core.sampling",
    "SplitserveError": "splitserve.core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
