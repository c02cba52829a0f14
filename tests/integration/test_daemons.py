"""Daemons as an operator meets them: ready lines, exit codes, any order, draining."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.client import Client
from splitserve.core.errors import UnavailableError
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster
from splitserve.process import DaemonProcess, stop_daemons
from splitserve.rpc.channel import open_sync_channel
from splitserve.v1 import node_pb2, node_pb2_grpc

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def daemons(tmp_path):
    """Starts daemons by hand, and stops what is left of them."""
    started: list[DaemonProcess] = []

    def start(kind: str, model: Path, **options: object) -> DaemonProcess:
        label = f"{kind}-{len(started)}"
        extra = {} if kind == "router" else NODE_OPTIONS
        daemon = DaemonProcess.start(kind, label, {"model": model, **extra, **options}, tmp_path)
        started.append(daemon)
        return daemon

    yield start
    stop_daemons(started)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_ready(daemon: DaemonProcess) -> str:
    wait_until(daemon.ready, 60, f"{daemon.kind} is ready")
    return daemon.address


def serving(address: str) -> bool:
    with open_sync_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(), timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def wait_exit(daemon: DaemonProcess, timeout_s: float = 20) -> tuple[int, str]:
    wait_until(lambda: not daemon.alive, timeout_s, f"{daemon.kind} exits")
    return daemon.process.returncode, daemon.log_path.read_text()


def test_fault_20_ready_only_once_a_node_of_each_kind_is_joined(tiny_model, daemons):
    router = wait_ready(daemons("router", tiny_model, listen="127.0.0.1:0"))
    assert not serving(router)
    with Client(router) as client:
        with pytest.raises(UnavailableError, match="no prefill and no decode node"):
            client.generate("hi").completion()
        wait_ready(daemons("prefill", tiny_model, listen="127.0.0.1:0", router=router))
        wait_until(lambda: len(client.status().nodes) == 1, 20, "prefill has joined")
        assert not serving(router)
        with pytest.raises(UnavailableError, match="no decode node"):
            client.generate("hi").completion()
        wait_ready(daemons("decode", tiny_model, listen="127.0.0.1:0", router=router))
        wait_until(lambda: serving(router), 20, "the router serves")
        assert client.generate("hi", sampling=SamplingParams(max_tokens=5)).completion().token_ids


def test_nodes_that_start_before_the_router_wait_for_it_and_say_so(tiny_model, daemons):
    address = free_address()
    decode = daemons("decode", tiny_model, listen="127.0.0.1:0", router=address)
    prefill = daemons("prefill", tiny_model, listen="127.0.0.1:0", router=address)
    assert not serving(wait_ready(prefill))
    wait_until(lambda: "waiting for the router" in decode.log_path.read_text(), 60, "decode waits")
    wait_ready(daemons("router", tiny_model, listen=address))
    wait_until(lambda: serving(address), 20, "the router serves")
    assert serving(prefill.address)
    with Client(address) as client:
        assert client.generate("hi", sampling=SamplingParams(max_tokens=5)).completion().token_ids


def test_a_node_gives_up_on_a_router_that_never_comes(tiny_model, daemons):
    node = daemons(
        "prefill", tiny_model, listen="127.0.0.1:0", router=free_address(), join_timeout=0.5
    )
    code, log = wait_exit(node, 60)
    assert code == 1
    assert "not reached within 0.5 s" in log.splitlines()[-1]


@pytest.mark.parametrize("change", ["vocabulary", "seed", "quantization", "dtype"])
def test_a_node_that_serves_another_model_is_refused_and_its_operator_told(
    tiny_model, cluster, daemons, tmp_path, change
):
    from tiny_model import write_tiny_model

    model, options = tiny_model, {}
    if change == "vocabulary":
        model = write_tiny_model(tmp_path / "other", vocab_size=600)
    else:
        options = {
            "seed": {"seed": 7},
            "quantization": {"quantization": "int8"},
            "dtype": {"dtype": "bfloat16"},
        }[change]
    node = daemons("decode", model, listen="127.0.0.1:0", router=cluster.address, **options)
    code, log = wait_exit(node, 60)
    assert code == 1
    last = log.splitlines()[-1]
    assert last.startswith("decode-node: ")
    named = {"dtype": "kv_dtype", "quantization": "-int8"}.get(change, "fingerprint")
    assert named in last


@pytest.mark.parametrize("kind", ["router", "prefill", "decode"])
def test_what_cannot_start_says_why_in_one_line_and_exits_non_zero(
    kind, tiny_model, cluster, daemons
):
    in_use = daemons(kind, tiny_model, listen=cluster.address)
    missing = daemons(kind, Path("/nowhere/at-all"), listen="127.0.0.1:0")
    for daemon, words in [(in_use, "port is in use"), (missing, "/nowhere/at-all")]:
        code, log = wait_exit(daemon)
        assert code == 1
        name = "router" if kind == "router" else f"{kind}-node"
        last = log.splitlines()[-1]
        assert last.startswith(f"{name}: ")
        assert words in last
        assert "Traceback" not in log


def test_no_shared_memory_left_is_said_before_anything_is_served(tiny_model, daemons):
    node = daemons("prefill", tiny_model, listen="127.0.0.1:0", num_blocks=10**9)
    code, log = wait_exit(node, 60)
    assert code == 1
    assert "shared memory" in log.splitlines()[-1]
    assert "Traceback" not in log


def test_sigterm_finishes_what_runs_and_then_ends_with_code_0(tiny_model):
    with LocalCluster(
        tiny_model, prefill_options=NODE_OPTIONS, decode_options=NODE_OPTIONS
    ) as cluster:
        with cluster.client() as client:
            sampling = SamplingParams(max_tokens=1500, seed=1, ignore_eos=True)
            generation = client.generate("The ferry", sampling=sampling)
            # The first token is the prefill node's: wait until the decode node runs the request.
            for _ in range(3):
                next(generation)
            for daemon in cluster.processes:
                daemon.process.send_signal(signal.SIGTERM)
            answer = generation.completion()
            assert answer.usage.completion_tokens == 1500
        for daemon in cluster.processes:
            wait_until(lambda daemon=daemon: not daemon.alive, 20, f"{daemon.kind} ended")
            assert daemon.process.returncode == 0


def test_an_operator_s_drain_finishes_what_runs_and_ends_the_node(tiny_model):
    with LocalCluster(
        tiny_model, prefill_options=NODE_OPTIONS, decode_options=NODE_OPTIONS
    ) as cluster:
        [decode] = [daemon for daemon in cluster.processes if daemon.kind == "decode"]
        with cluster.client() as client, open_sync_channel(decode.address) as channel:
            sampling = SamplingParams(max_tokens=800, seed=1, ignore_eos=True)
            generation = client.generate("The ferry", sampling=sampling)
            for _ in range(3):
                next(generation)
            node_pb2_grpc.NodeControlStub(channel).Drain(node_pb2.DrainRequest(), timeout=5)
            wait_until(lambda: not serving(decode.address), 5, "it takes no more")
            assert generation.completion().usage.completion_tokens == 800
            code, _ = wait_exit(decode)
            assert code == 0
            with pytest.raises(UnavailableError, match="no decode node"):
                client.generate("The ferry").completion()


def test_a_second_sigterm_stops_at_once(tiny_model):
    with LocalCluster(
        tiny_model, prefill_options=NODE_OPTIONS, decode_options=NODE_OPTIONS
    ) as cluster:
        [decode] = [daemon for daemon in cluster.processes if daemon.kind == "decode"]
        with cluster.client() as client:
            sampling = SamplingParams(max_tokens=20_000, seed=1, ignore_eos=True)
            generation = client.generate("The ferry", sampling=sampling)
            for _ in range(3):
                next(generation)
            decode.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "told to stop" in decode.log_path.read_text(), 5, "it drains")
            assert decode.alive
            decode.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not decode.alive, 5, "it stopped")
            generation.cancel()


def test_killing_every_daemon_leaves_no_worker_and_no_segment(tiny_model):
    with LocalCluster(
        tiny_model, prefill_options=NODE_OPTIONS, decode_options=NODE_OPTIONS
    ) as cluster:
        workers = [
            child
            for daemon in cluster.processes
            for child in psutil.Process(daemon.pid).children(recursive=True)
        ]
        assert len(workers) == 2
        with cluster.client() as client:
            epochs = [node.info.epoch for node in client.status().nodes]

        def segments() -> list[Path]:
            return [p for e in epochs for p in Path("/dev/shm").glob(f"splitserve-{e}-*")]

        assert len(segments()) == 2
        for daemon in cluster.processes:
            daemon.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
        wait_until(lambda: not segments(), 5, "the segments are gone")


def test_the_router_never_imports_torch_and_is_small_after_its_start(tiny_model, daemons):
    router = daemons("router", tiny_model, listen="127.0.0.1:0")
    wait_ready(router)
    process = psutil.Process(router.pid)
    mapped = {Path(entry.path).name for entry in process.memory_maps()}
    assert not [name for name in mapped if name.startswith("libtorch")]
    assert process.memory_info().rss < 120 * 2**20


@pytest.mark.parametrize("daemon", ["router", "prefill_node", "decode_node"])
def test_no_daemon_s_own_process_imports_torch_or_transformers(daemon):
    program = (
        f"import sys, {daemon}.cli, {daemon}.daemon\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_cluster_still_serves(cluster):
    with cluster.client() as client:
        client.generate("hi", sampling=SamplingParams(max_tokens=5)).completion()
        assert_settled(client)
