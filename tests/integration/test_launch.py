"""A node whose ranks a launcher starts: two torchrun groups on one machine stand for two hosts."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until

from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster
from splitserve.process import option_arguments

START_S = 60.0
NODE_EXIT_S = 5.0
PROMPTS = [[number * 7 + place for place in range(40 + number)] for number in range(3)]
SAMPLING = SamplingParams(max_tokens=12, seed=5, logprobs=1)


def free_port() -> int:
    """One that is free, and the one after it too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


@dataclass
class Hosts:
    """A prefill node's ranks, each started as if on a host of its own."""

    model: Path
    router: str
    directory: Path
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, rank: int, *, by_hand: bool = False, num_ranks: int = 2, **options) -> None:
        """Starts what runs on one host."""
        options = NODE_OPTIONS | {"model": self.model, "tensor_parallel_size": 2} | options
        options |= {"router": self.router, "listen": "127.0.0.1:0", "launcher": "torchrun"}
        node = ["-m", "prefill_node.cli", "start", *option_arguments(options)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        if by_hand:
            command = [sys.executable, *node]
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
            command += ["--nnodes", str(num_ranks), "--node-rank", str(rank)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(self.port), *node]
        with (self.directory / f"{rank}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )

    def said(self, rank: int) -> str:
        """What that host's processes wrote."""
        return (self.directory / f"{rank}.log").read_text()

    def worker(self, rank: int) -> psutil.Process:
        """A rank's worker process."""
        for process in self.processes:
            root = psutil.Process(process.pid)
            for one in (root, *root.children()):
                if f"engine.worker --rank {rank} " in " ".join(one.cmdline()):
                    return one
        raise AssertionError(f"no worker of rank {rank}")

    def all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)


@pytest.fixture(scope="module")
def cluster(tiny_model, no_leaks):
    with LocalCluster(tiny_model, prefill_options=NODE_OPTIONS, decode_options=NODE_OPTIONS) as one:
        yield one


@pytest.fixture(scope="module")
def expected(cluster):
    """The answers of one rank; ends its node, so that only launched ones are left."""
    with cluster.client() as client:
        answers = [client.generate(token_ids=p, sampling=SAMPLING).completion() for p in PROMPTS]
        cluster.processes[1].process.send_signal(signal.SIGTERM)
        wait_until(lambda: not cluster.processes[1].alive, 10, "the node of one rank leaves")
        return [answer.token_ids for answer in answers]


@pytest.fixture
def hosts(cluster, expected, tiny_model, tmp_path):
    hosts = Hosts(tiny_model, cluster.processes[0].address, tmp_path)
    yield hosts
    for process in hosts.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    try:
        wait_until(hosts.all_ended, 15, "all of both hosts has ended")
    finally:
        for process in hosts.processes:
            process.kill()
            process.wait()


def wait_ready(hosts: Hosts, client) -> None:
    def ready() -> bool:
        assert not any(process.poll() for process in hosts.processes), hosts.said(0) + hosts.said(1)
        return len(client.status().nodes) == 2

    wait_until(ready, START_S, "the node has joined the router")


@pytest.mark.parametrize("by_hand", [False, True], ids=["torchrun", "by-hand"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["node-first", "rank-first"])
def test_two_hosts_answer_as_one_rank_does(cluster, expected, hosts, order, by_hand):
    for rank in order:
        hosts.start(rank, by_hand=by_hand)
    with cluster.client() as client:
        wait_ready(hosts, client)
        answers = [client.generate(token_ids=p, sampling=SAMPLING).completion() for p in PROMPTS]
        assert [answer.token_ids for answer in answers] == expected
        [info] = [node.info for node in client.status().nodes if len(node.info.ranks) == 2]
        assert info.kind.label == "prefill"
        assert_settled(client)
        # Only the node is told to stop; the other host's rank goes with it.
        node = hosts.processes[order.index(0)]
        node.send_signal(signal.SIGTERM)
        wait_until(hosts.all_ended, 15, "both hosts end")
        if by_hand:  # torchrun itself ends with tracebacks and codes of its own.
            assert "Traceback" not in hosts.said(0) + hosts.said(1)
            assert [process.returncode for process in hosts.processes] == [0, 0]


def test_a_far_rank_that_is_killed_takes_the_node_along(cluster, hosts):
    for rank in (0, 1):
        hosts.start(rank, by_hand=True)
    with cluster.client() as client:
        wait_ready(hosts, client)
    hosts.worker(1).kill()
    wait_until(hosts.all_ended, NODE_EXIT_S, "the node ends")
    assert hosts.processes[0].returncode == 1
    last = hosts.said(0).splitlines()[-1]
    pid = hosts.processes[1].pid
    assert last == (
        f"prefill-node: a worker failed: worker process {pid} on 127.0.0.1 (rank 1 of 2) has gone"
    )


def test_a_far_rank_goes_when_its_node_is_killed(cluster, hosts):
    for rank in (0, 1):
        hosts.start(rank, by_hand=True)
    with cluster.client() as client:
        wait_ready(hosts, client)
    hosts.processes[0].kill()
    wait_until(hosts.all_ended, NODE_EXIT_S, "the far rank ends")


def test_a_far_rank_that_stands_still_does_not_hold_the_node(cluster, hosts):
    for rank in (0, 1):
        hosts.start(rank, by_hand=True)
    with cluster.client() as client:
        wait_ready(hosts, client)
    hosts.processes[1].send_signal(signal.SIGSTOP)
    hosts.worker(0).kill()
    wait_until(lambda: hosts.processes[0].poll() is not None, NODE_EXIT_S, "the node ends")
    assert "rank 0 of 2) was killed by SIGKILL" in hosts.said(0).splitlines()[-1]
    hosts.processes[1].send_signal(signal.SIGCONT)
    wait_until(hosts.all_ended, NODE_EXIT_S, "the far rank ends")


def test_what_a_launcher_sets_has_to_fit(hosts):
    hosts.start(0, by_hand=True, num_ranks=3)
    wait_until(hosts.all_ended, START_S, "it ends")
    assert hosts.processes[0].returncode == 1
    assert hosts.said(0) == (
        "prefill-node: WORLD_SIZE: 3 is not allowed; "
        "allowed: tensor_parallel_size * pipeline_parallel_size, 2\n"
    )


def test_a_rank_of_another_node_is_turned_away(hosts):
    hosts.start(0, by_hand=True)
    hosts.start(1, by_hand=True, num_ranks=4, pipeline_parallel_size=2)
    wait_until(lambda: hosts.processes[1].poll() is not None, START_S, "it is turned away")
    assert hosts.processes[1].returncode == 1
    last = hosts.said(1).splitlines()[-1]
    assert last == "prefill-node: num_ranks: rank 1 has 4, its node has 2"
    assert hosts.processes[0].poll() is None, "the node still waits for the right one"
    hosts.processes[0].send_signal(signal.SIGTERM)
    wait_until(hosts.all_ended, NODE_EXIT_S, "told to stop, it waits no longer")
    assert hosts.processes[0].returncode == 0
