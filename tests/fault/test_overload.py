"""A decode side with one place: waiting, refusals, and prefill memory given back."""

import time
from contextlib import contextmanager

import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until

from splitserve.core.errors import ResourceExhaustedError
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

LONG = SamplingParams(max_tokens=20_000, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
PROMPT = [7] * 40


@pytest.fixture(scope="module")
def shared_narrow_cluster(tiny_model, no_leaks):
    with LocalCluster(
        tiny_model,
        router_options={"handover_timeout": 1.0},
        prefill_options=NODE_OPTIONS,
        decode_options={**NODE_OPTIONS, "max_batch_size": 1, "max_queued_requests": 1},
    ) as cluster:
        yield cluster


@pytest.fixture
def client(shared_narrow_cluster):
    """Of a cluster whose decode node runs one request and lets one wait."""
    with shared_narrow_cluster.client() as client:
        yield client
        assert_settled(client)


def blocks(client, kind: str, state: str) -> int:
    [node] = [node for node in client.status().nodes if node.info.kind.label == kind]
    return getattr(node, f"blocks_{state}")


@contextmanager
def full_decode_node(client, waiting: int):
    """One request runs and ``waiting`` have their KV leased; all are given up at the end."""
    running = client.generate(token_ids=PROMPT, sampling=LONG)
    for _ in range(3):
        next(running)
    held = [client.generate(token_ids=PROMPT, sampling=LONG) for _ in range(waiting)]
    for generation in held:
        next(generation)
    yield
    for generation in [running, *held]:
        generation.cancel()


def test_fault_01_leaving_between_prefill_and_decode_frees_prefill_blocks_within_a_second(client):
    with full_decode_node(client, waiting=0):
        waiting = client.generate(token_ids=PROMPT, sampling=LONG)
        next(waiting)
        wait_until(lambda: blocks(client, "prefill", "leased") == 3, 5, "its KV is leased")
        waiting.cancel()
        wait_until(lambda: blocks(client, "prefill", "leased") == 0, 1, "the lease is over")


def test_fault_02_a_request_that_every_decode_node_refuses_gives_its_prefill_blocks_back(client):
    with full_decode_node(client, waiting=1):
        started = time.monotonic()
        with pytest.raises(ResourceExhaustedError, match="handover_timeout_s"):
            client.generate(token_ids=PROMPT, sampling=LONG).completion()
        assert 0.9 < time.monotonic() - started < 5.0
        wait_until(lambda: blocks(client, "prefill", "leased") == 0, 2, "every lease is over")


def test_fault_21_overload_marks_no_node_bad(client):
    with full_decode_node(client, waiting=1):
        with pytest.raises(ResourceExhaustedError):
            client.generate(token_ids=PROMPT, sampling=LONG).completion()
        assert [node.serving for node in client.status().nodes] == [True, True]
    assert_settled(client)
    answer = client.generate(token_ids=PROMPT, sampling=SHORT).completion()
    assert len(answer.token_ids) == 4


def test_a_request_that_waits_for_decode_runs_as_soon_as_there_is_a_place(client):
    running = client.generate(token_ids=PROMPT, sampling=LONG)
    for _ in range(3):
        next(running)
    waiting = client.generate(token_ids=PROMPT, sampling=SHORT)
    next(waiting)
    wait_until(lambda: blocks(client, "prefill", "leased") == 3, 5, "its KV is leased")
    running.cancel()
    assert waiting.completion().finish_reason.name == "LENGTH"
