"""Session-wide clusters of a tiny model, and the checks that every test of them ends with."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clusters import NODE_OPTIONS, assert_settled, stale_segments, wait_until
from tiny_model import write_tiny_model

from splitserve.client import Client
from splitserve.local import LocalCluster

# A script that starts the tests in the background has Ctrl-C ignored, by our children too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=32_768
    )


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
