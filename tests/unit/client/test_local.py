"""LocalCluster over daemons that only pretend: what it does when they fail, hang or are left."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_router import PREFILL_STATUS, ScriptedRouter, eventually, last, piece

from splitserve import process
from splitserve.core.errors import InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.core.node import NodeKind
from splitserve.local import MAX_CONCURRENT_PROMPTS, LocalCluster
from splitserve.process import option_arguments, stop_daemons
from splitserve.v1 import router_pb2

DECODE_STATUS = replace(
    PREFILL_STATUS,
    info=replace(PREFILL_STATUS.info, kind=NodeKind.DECODE, address="127.0.0.1:2"),
)

FAKE_DAEMON = """
import os, signal, sys, time
kind, behaviour = "{kind}", os.environ.get("FAKE_{kind}", "good")
print("arguments", *sys.argv[1:], file=sys.stderr, flush=True)
if behaviour == "die":
    print("model: no weights here", file=sys.stderr)
    sys.exit(3)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    def note(text):
        with open(os.environ["FAKE_SIGNALS"], "a") as file:
            file.write(text + chr(10))
    def stop(*_):
        note(kind)
        time.sleep(0.3)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    # Of two signals that wait, Python handles this one after SIGTERM.
    signal.signal(signal.SIGWINCH, lambda *_: note("alive-" + kind))
if behaviour != "silent":
    print("{name} ready on", os.environ["FAKE_ADDRESS_{kind}"], flush=True)
while True:
    time.sleep(0.05)  # Short: Python misses a signal that comes just before a sleep begins.
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


@pytest.fixture
def signals(tmp_path: Path) -> Path:
    """A line per signal that a daemon has had."""
    file = tmp_path / "signals"
    file.touch()
    return file


@pytest.fixture(autouse=True)
def fake_daemons(
    router: ScriptedRouter,
    address: str,
    signals: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router.nodes = [PREFILL_STATUS, DECODE_STATUS]
    addresses = {"router": address, "prefill": "127.0.0.1:1", "decode": "127.0.0.1:2"}
    modules = tmp_path / "modules"
    modules.mkdir()
    commands = {}
    for kind, (_, name) in process._COMMANDS.items():
        (modules / f"fake_{kind}.py").write_text(FAKE_DAEMON.format(kind=kind, name=name))
        commands[kind] = (f"fake_{kind}", name)
        monkeypatch.setenv(f"FAKE_ADDRESS_{kind}", addresses[kind])
    monkeypatch.setattr(process, "_COMMANDS", commands)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("FAKE_SIGNALS", str(signals))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))


@pytest.fixture
def children() -> Callable[[], set[psutil.Process]]:
    """What this test has started; the session's own clusters are none of its business."""
    me = psutil.Process()
    others = set(me.children(recursive=True))
    return lambda: set(me.children(recursive=True)) - others


def test_a_cluster_serves_inside_the_block_and_is_gone_after_it(
    model: Path, address: str, signals: Path, children: Callable[[], set[psutil.Process]]
) -> None:
    with LocalCluster(model, decode_options={"use_dummy_weights": True}) as cluster:
        assert [daemon.kind for daemon in cluster.processes] == ["router", "prefill", "decode"]
        assert cluster.address == address
        with cluster.client() as client:
            assert len(client.status().nodes) == 2
        log = cluster.processes[2].log_path
        eventually(lambda: "arguments" in log.read_text(), "the daemon wrote its arguments")
        assert f"--model {model} --listen 127.0.0.1:0 --router {address}" in log.read_text()
        assert "--use-dummy-weights" in log.read_text()
    assert not children()
    assert not cluster.directory.exists()
    assert sorted(signals.read_text().split()) == ["decode", "prefill", "router"]
    assert [daemon.process.returncode for daemon in cluster.processes] == [0, 0, 0]


def test_a_daemon_that_dies_at_start_is_quoted_and_the_others_are_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[psutil.Process]]
) -> None:
    monkeypatch.setenv("FAKE_decode", "die")
    cluster = LocalCluster(model)
    with pytest.raises(UnavailableError, match=r"decode-node ended .* 3:\n.*\nmodel: no wei") as e:
        cluster.__enter__()
    assert not children()
    assert str(cluster.directory) in e.value.__notes__[0]
    assert (cluster.directory / "decode-3.log").exists()


def test_a_node_that_never_gets_ready_is_named_when_the_time_is_over(
    model: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[psutil.Process]]
) -> None:
    monkeypatch.setenv("FAKE_prefill", "silent")
    with pytest.raises(UnavailableError, match=r"within 2 s; not ready: prefill-2"):
        LocalCluster(model, start_timeout_s=2).__enter__()
    assert not children()


def test_a_node_that_never_joins_ends_the_start(
    model: Path, router: ScriptedRouter, children: Callable[[], set[psutil.Process]]
) -> None:
    router.nodes = [PREFILL_STATUS, replace(DECODE_STATUS, serving=False)]
    with pytest.raises(UnavailableError, match="not all nodes serve"):
        LocalCluster(model, start_timeout_s=2).__enter__()
    assert not children()


def test_ctrl_c_during_the_start_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[psutil.Process]]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalCluster, "_await_joined", interrupt)
    cluster = LocalCluster(model)
    with pytest.raises(KeyboardInterrupt):
        cluster.__enter__()
    assert not children()
    assert not cluster.directory.exists()


def test_a_failing_block_keeps_the_logs_and_says_where(model: Path) -> None:
    cluster = LocalCluster(model)
    with pytest.raises(ZeroDivisionError) as raised, cluster:
        raise ZeroDivisionError
    assert (cluster.directory / "router-1.log").exists()
    assert str(cluster.directory) in raised.value.__notes__[0]


def test_a_daemon_that_ignores_sigterm_is_killed(
    model: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[psutil.Process]]
) -> None:
    monkeypatch.setenv("FAKE_prefill", "stubborn")
    with LocalCluster(model) as cluster:
        stop_daemons(cluster.processes, timeout_s=1.0)
    assert cluster.processes[1].process.returncode == -signal.SIGKILL
    assert not children()


def test_nodes_come_and_go_in_a_running_cluster(model: Path) -> None:
    with LocalCluster(model) as cluster:
        added = cluster.start_node("decode", num_blocks=7)
        eventually(lambda: "--num-blocks 7" in added.log_path.read_text(), "it has its option")
        assert cluster.processes[-1] is added
        cluster.stop_node(added)
        assert not added.alive
        assert len(cluster.processes) == 3


def test_daemons_live_on_without_the_thread_that_entered_and_end_with_its_process(
    model: Path, signals: Path
) -> None:
    program = (
        "import os, signal, sys, threading, time\n"
        "from splitserve import process\n"
        "from splitserve.local import LocalCluster\n"
        "process._COMMANDS = {k: (f'fake_{k}', n) for k, (_, n) in process._COMMANDS.items()}\n"
        "cluster = LocalCluster(sys.argv[1])\n"
        "thread = threading.Thread(target=cluster.__enter__)\n"
        "thread.start(); thread.join()\n"
        "while os.path.exists(f'/proc/self/task/{thread.native_id}'): time.sleep(0.001)\n"
        "for d in cluster.processes: os.kill(d.pid, signal.SIGWINCH)\n"
        "print(*[d.pid for d in cluster.processes], flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, model], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    eventually(lambda: len(signals.read_text().split()) >= 3, "every daemon has answered")
    heard = signals.read_text().split()
    assert sorted(heard) == ["alive-decode", "alive-prefill", "alive-router"]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(lambda: all(map(gone, pids)), "the daemons ended with their parent")


def test_ctrl_c_in_a_terminal_tells_every_daemon_once(model: Path, signals: Path) -> None:
    program = (
        "import sys, time\n"
        "from splitserve import process\n"
        "from splitserve.local import LocalCluster\n"
        "process._COMMANDS = {k: (f'fake_{k}', n) for k, (_, n) in process._COMMANDS.items()}\n"
        "with LocalCluster(sys.argv[1]):\n"
        "    print('serving', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"serving\n"
        # A terminal signals its whole foreground group.
        os.killpg(parent.pid, signal.SIGINT)
        _, stderr = parent.communicate(timeout=20)
    assert stderr.rstrip().endswith(b"KeyboardInterrupt")
    assert sorted(signals.read_text().split()) == ["decode", "prefill", "router"]


def test_answers_come_in_the_prompts_order_and_not_all_at_once(
    model: Path, router: ScriptedRouter
) -> None:
    async def answer(request: router_pb2.GenerateRequest) -> AsyncIterator[Any]:
        yield piece(request.prompt.upper())
        await asyncio.sleep(0.02 if int(request.prompt[1:]) % 3 else 0.05)
        yield last("!")

    router.answer = answer
    prompts = [f"p{number}" for number in range(3 * MAX_CONCURRENT_PROMPTS)]
    with LocalCluster(model) as cluster:
        answers = cluster.generate(prompts)
        assert [a.text for a in answers] == [f"{prompt.upper()}!" for prompt in prompts]
        assert cluster.generate([]) == []
    assert 1 < router.most_running <= MAX_CONCURRENT_PROMPTS


def test_one_failed_prompt_is_the_error_of_the_whole_and_cancels_the_rest(
    model: Path, router: ScriptedRouter
) -> None:
    async def answer(request: router_pb2.GenerateRequest) -> AsyncIterator[Any]:
        if request.prompt == "bad":
            raise InvalidArgumentError("prompt: too long")
        await asyncio.Event().wait()
        yield last()

    router.answer = answer
    with LocalCluster(model) as cluster:
        with pytest.raises(InvalidArgumentError, match="too long"):
            cluster.generate(["good", "bad"])
        eventually(lambda: router.running == 0, "the other prompt was cancelled")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda model: LocalCluster(model / "missing"), "missing"),
        (lambda model: LocalCluster(model, decode=0), "decode: 0"),
        (lambda model: LocalCluster(model, prefill_options={"router": "x:1"}), "router"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(
    model: Path, build: Callable[[Path], LocalCluster], named: str
) -> None:
    with pytest.raises(SplitserveError, match=named):
        build(model)


def test_options_are_spelled_as_a_command_line_spells_them() -> None:
    given = {"block_size": 8, "use_dummy_weights": True, "num_blocks": None, "quiet": False}
    assert option_arguments(given) == ["--block-size", "8", "--use-dummy-weights"]
