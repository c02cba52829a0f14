"""Nodes and workers that die under load."""

import time

import psutil
import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until

from splitserve.core.errors import UnavailableError
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

LONG = SamplingParams(max_tokens=1_000, seed=9, ignore_eos=True)
PROMPT = [7] * 40


# The same long prompt has to take its time again and again.
OPTIONS = {**NODE_OPTIONS, "no_prefix_cache": True}


@pytest.fixture(scope="module")
def shared_mortal_cluster(tiny_model, no_leaks):
    with LocalCluster(
        tiny_model,
        prefill_options={**OPTIONS, "max_tokens_per_batch": 64},
        decode_options=OPTIONS,
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_mortal_cluster):
    """A cluster whose nodes may be killed: what died is replaced for the next test."""
    cluster = shared_mortal_cluster
    yield cluster
    for kind in ("prefill", "decode"):
        nodes = [node for node in cluster.processes if node.kind == kind]
        for node in nodes[1:]:
            cluster.stop_node(node)
    for node in [node for node in cluster.processes if not node.alive]:
        kind = node.kind
        cluster.stop_node(node)
        cluster.start_node(kind)
    with cluster.client() as client:
        assert_settled(client)


def node(cluster, kind: str):
    return next(daemon for daemon in cluster.processes if daemon.kind == kind)


def worker_of(daemon) -> psutil.Process:
    [worker] = psutil.Process(daemon.pid).children(recursive=True)
    return worker


@pytest.mark.parametrize("victim", ["daemon", "worker"])
def test_fault_18_the_client_hears_of_a_lost_prefill_node_within_a_second(cluster, victim):
    prefill = node(cluster, "prefill")
    with cluster.client() as client:
        generation = client.generate(token_ids=[5] * 30_000, sampling=SamplingParams(max_tokens=9))
        wait_until(lambda: any(n.running for n in client.status().nodes), 10, "it has begun")
        process = psutil.Process(prefill.pid) if victim == "daemon" else worker_of(prefill)
        process.kill()
        killed = time.monotonic()
        with pytest.raises(UnavailableError, match="prefill"):
            generation.completion()
        assert time.monotonic() - killed < 1.0
        wait_until(lambda: not prefill.alive, 5, "never half alive")


def test_a_lost_prefill_node_s_prompt_is_computed_by_another(cluster):
    other = cluster.start_node("prefill", max_tokens_per_batch=64)
    sampling = SamplingParams(max_tokens=9, seed=4)
    with cluster.client() as client:
        undisturbed = client.generate(token_ids=[5] * 9_000, sampling=sampling).completion()
        generation = client.generate(token_ids=[5] * 9_000, sampling=sampling)
        first, second = node(cluster, "prefill"), other
        by_address = {first.address: first, second.address: second}

        def busy() -> list[str]:
            return [n.info.address for n in client.status().nodes if n.running]

        wait_until(lambda: bool(busy()), 10, "it has begun")
        psutil.Process(by_address[busy()[0]].pid).kill()
        answer = generation.completion()
    assert answer.token_ids == undisturbed.token_ids
    assert LifetimeEventKind.RETRIED in [event.kind for event in answer.lifetime.events]


def test_a_lost_decode_node_s_answer_goes_on_elsewhere_without_gap_or_repeat(cluster):
    cluster.start_node("decode")
    with cluster.client() as client:
        undisturbed = client.generate(token_ids=PROMPT, sampling=LONG).completion()
        generation = client.generate(token_ids=PROMPT, sampling=LONG)
        tokens = list(next(generation).token_ids)
        while len(tokens) < 20:
            tokens += next(generation).token_ids
        [busy] = [n.info.address for n in client.status().nodes if n.running]
        [victim] = [daemon for daemon in cluster.processes if daemon.address == busy]
        worker_of(victim).kill()
        for delta in generation:
            tokens += delta.token_ids
            lifetime = delta.lifetime
    assert tuple(tokens) == undisturbed.token_ids
    assert LifetimeEventKind.RETRIED in [event.kind for event in lifetime.events]


def test_a_worker_that_dies_takes_its_node_down_with_a_reason(cluster):
    decode = node(cluster, "decode")
    worker_of(decode).kill()
    wait_until(lambda: not decode.alive, 5, "the node ends")
    assert decode.process.returncode == 1
    last = decode.log_path.read_text().splitlines()[-1]
    assert last.startswith("decode-node: a worker failed: ")
    assert "SIGKILL" in last


def test_a_router_that_dies_leaves_nothing_running_on_its_nodes(cluster):
    from splitserve.rpc.channel import open_sync_channel
    from splitserve.v1 import node_pb2, node_pb2_grpc

    with cluster.client() as client:
        generation = client.generate(token_ids=PROMPT, sampling=LONG)
        next(generation)
        decode = node(cluster, "decode")
        with open_sync_channel(decode.address) as channel:
            ask = node_pb2_grpc.NodeControlStub(channel).GetNodeStatus

            def status():
                return ask(node_pb2.GetNodeStatusRequest(), timeout=5)

            wait_until(lambda: status().running == 1, 5, "it runs")
            router = node(cluster, "router")
            address = router.address
            router.process.kill()
            wait_until(lambda: status().running == 0, 2, "the node dropped it")
            assert status().blocks_free + status().blocks_cached == status().blocks_total
        with pytest.raises(UnavailableError):
            list(generation)
        cluster.processes.remove(router)
        router.process.wait()
        # Nodes join again by themselves (fault 25).
        from splitserve.process import DaemonProcess

        again = DaemonProcess.start(
            "router", "router-again", {"model": cluster._model, "listen": address},
            cluster.directory,
        )  # fmt: skip
        cluster.processes.insert(0, again)
        wait_until(again.ready, 20, "the router is back")
        wait_until(lambda: len(client_nodes(cluster)) == 2, 20, "both nodes are back")


def client_nodes(cluster):
    with cluster.client() as client:
        return [node for node in client.status().nodes if node.serving]
