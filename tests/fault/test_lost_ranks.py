"""One of a node's four ranks is killed; the node goes with it, and its requests go on elsewhere."""

import re

import psutil
import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until

from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

FOUR_RANKS = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
NODE_EXIT_S = 2.0
SHORT = SamplingParams(max_tokens=9, seed=4)


# The same long prompt has to take its time again and again.
OPTIONS = {**NODE_OPTIONS, "no_prefix_cache": True}


@pytest.fixture(scope="module")
def cluster(tiny_model, no_leaks):
    """Two prefill and two decode nodes, the second ones of four ranks each."""
    with LocalCluster(
        tiny_model,
        prefill_options={**OPTIONS, "max_tokens_per_batch": 64},
        decode_options=OPTIONS,
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        yield client
        assert_settled(client)


def ranks_of(daemon) -> list[psutil.Process]:
    """The worker processes, by rank."""
    workers = psutil.Process(daemon.pid).children(recursive=True)
    return sorted(
        workers, key=lambda worker: worker.cmdline()[worker.cmdline().index("--rank") + 1]
    )


def queues(client, daemon):
    [node] = [n for n in client.status().nodes if n.info.address == daemon.address]
    return node


def assert_node_goes(daemon, victim: int) -> None:
    wait_until(lambda: not daemon.alive, NODE_EXIT_S, "the node ends")
    assert daemon.process.returncode == 1
    lines = daemon.log_path.read_text().splitlines()
    said = [line for line in lines if "SIGKILL" in line]
    pattern = rf"{daemon.kind}-node: a worker failed: worker process \d+ \(rank {victim} of 4\) .*"
    assert len(said) == 1, lines
    assert re.fullmatch(pattern, said[0])
    assert "Traceback" not in "\n".join(lines)


def assert_right(running, expected, kind: LifetimeEventKind, count: int) -> None:
    """Every answer is, and their lifetimes have so many events of this kind together."""
    answers = [generation.completion() for generation in running]
    assert all(answer.token_ids == expected.token_ids for answer in answers)
    kinds = [event.kind for answer in answers for event in answer.lifetime.events]
    assert kinds.count(kind) == count


def test_a_rank_killed_in_a_step_costs_nobody_an_answer(cluster, client):
    prompt = [5] * 6_000
    expected = client.generate(token_ids=prompt, sampling=SHORT).completion()
    wide = cluster.start_node("prefill", **FOUR_RANKS)
    running = [client.generate(token_ids=prompt, sampling=SHORT) for _ in range(2)]
    wait_until(lambda: queues(client, wide).running == 1, 10, "it computes")
    ranks_of(wide)[1].kill()
    assert_node_goes(wide, 1)
    assert_right(running, expected, LifetimeEventKind.RETRIED, 1)


def test_a_rank_killed_in_a_pull_costs_nobody_an_answer(cluster, client):
    prompt = [7] * 300
    # The first of the two is still running when the second is sent to the other node.
    sampling = SamplingParams(max_tokens=1_000, seed=4, ignore_eos=True)
    expected = client.generate(token_ids=prompt, sampling=sampling).completion()
    wide = cluster.start_node("decode", **FOUR_RANKS)
    ranks = ranks_of(wide)
    ranks[3].suspend()  # It never gets its part, so that the pull is under way for good.
    running = [client.generate(token_ids=prompt, sampling=sampling) for _ in range(2)]
    wait_until(lambda: queues(client, wide).importing == 1, 10, "it pulls")
    ranks[2].kill()
    assert_node_goes(wide, 2)
    # Its KV was still with the prefill node, for another one to pull.
    assert_right(running, expected, LifetimeEventKind.RETRIED, 0)
