"""Session-wide clusters of a tiny model, and the checks that every test of them ends with."""

import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tiny_model import write_tiny_model

from splitserve.client import Client, ClusterStatus
from splitserve.local import LocalCluster

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
        found[f"{name} blocks"] = node.blocks_total - node.blocks_free
        found[f"{name} requests"] = node.waiting + node.running + node.importing
    return {key: value for key, value in found.items() if value}


def assert_settled(client: Client) -> None:
    """Every block came back and every counter is zero."""
    wait_until(lambda: not held(client.status()), SETTLE_S, f"settled: {held(client.status())}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=32_768
    )


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


@pytest.fixture(scope="session")
def no_leaks() -> Iterator[None]:
    """No process and no shared-memory segment outlives the clusters of a session."""
    yield
    children = psutil.Process().children(recursive=True)
    assert not children, f"processes left: {[child.cmdline() for child in children]}"
    wait_until(lambda: not stale_segments(), 2, f"no segment is left: {stale_segments()}")


@pytest.fixture(scope="session")
def shared_cluster(tiny_model, no_leaks) -> Iterator[LocalCluster]:
    with LocalCluster(
        tiny_model,
        prefill_options={**NODE_OPTIONS, "block_size": 16, "max_tokens_per_batch": 256},
        decode_options={**NODE_OPTIONS, "block_size": 32},
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster) -> Iterator[LocalCluster]:
    """One prefill and one decode node, of different block sizes."""
    yield shared_cluster
    with shared_cluster.client() as client:
        assert_settled(client)


@pytest.fixture
def client(cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture(scope="session")
def shared_wide_cluster(tiny_model, no_leaks) -> Iterator[LocalCluster]:
    with LocalCluster(
        tiny_model,
        prefill=2,
        decode=2,
        prefill_options={**NODE_OPTIONS, "max_tokens_per_batch": 256},
        decode_options=NODE_OPTIONS,
    ) as cluster:
        yield cluster


@pytest.fixture
def wide_cluster(shared_wide_cluster) -> Iterator[LocalCluster]:
    """Two prefill and two decode nodes."""
    yield shared_wide_cluster
    with shared_wide_cluster.client() as client:
        assert_settled(client)


@pytest.fixture(scope="session")
def one_process(tiny_model):
    from one_process import OneProcess

    return OneProcess(tiny_model)
