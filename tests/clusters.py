"""What every test of a whole cluster asks of it."""

import fcntl
import time
from collections.abc import Callable
from pathlib import Path

from splitserve.client import Client, ClusterStatus

SETTLE_S = 2.0
"""How soon after a request's end nothing may be held for it any more."""

NODE_OPTIONS = {"use_dummy_weights": True, "dtype": "float32", "threads": 1}
"""Options that every node of a tiny cluster has."""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for a condition; fails with ``what`` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def held(status: ClusterStatus) -> dict[str, object]:
    """All that a cluster holds for requests; empty when nothing runs."""
    found: dict[str, object] = {"queued": status.queued, "running": status.running}
    for node in status.nodes:
        name = node.info.name
        found[f"{name} blocks"] = node.blocks_total - node.blocks_free - node.blocks_cached
        found[f"{name} requests"] = node.waiting + node.running + node.importing
    return {key: value for key, value in found.items() if value}


def assert_settled(client: Client) -> None:
    """Every block came back and every counter is zero."""
    wait_until(lambda: not held(client.status()), SETTLE_S, f"settled: {held(client.status())}")


def stale_segments() -> set[str]:
    """Segments whose owner is dead; those of other clusters on this machine are locked."""
    return {path.name for path in Path("/dev/shm").glob("splitserve-*") if _unlocked(path)}


def _unlocked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
