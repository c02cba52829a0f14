"""A whole cluster on this machine, as child processes."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from splitserve.client import AsyncClient, Client, Completion
from splitserve.core.errors import InvalidArgumentError, SplitserveError, UnavailableError, invalid
from splitserve.core.sampling import SamplingParams
from splitserve.process import STOP_TIMEOUT_S, DaemonKind, DaemonProcess, stop_daemons
from splitserve.rpc.channel import open_sync_channel

NodeKindName = Literal["prefill", "decode"]

START_TIMEOUT_S = 300.0
"""How long a cluster may take from nothing to serving."""

MAX_CONCURRENT_PROMPTS = 64
"""Most prompts that `LocalCluster.generate` has under way."""

POLL_INTERVAL_S = 0.02
POLL_TIMEOUT_S = 2.0
"""Limit of one question about health or status while the cluster starts."""

OWN_OPTIONS = ("model", "router", "advertise")
"""Options that the cluster sets itself."""


class LocalCluster:
    """A router and its nodes as child processes of this one; Linux only.

    ``with LocalCluster(model) as cluster`` starts them, waits until every node serves, and
    stops them when the block is left. They end with this process, however it ends. Their logs
    lie in a temporary directory, which is kept and named if the start or the block fails.

    Args:
        model: Directory in the Hugging Face format; ``"default"`` takes the default model,
            imported on first use.
        prefill: Number of prefill nodes.
        decode: Number of decode nodes.
        router_options: Options of ``router start``, by name with underscores.
        prefill_options: Options of ``prefill-node start``.
        decode_options: Options of ``decode-node start``.
        start_timeout_s: How long the start may take, and each `start_node`.

    Attributes:
        processes: The daemons, the router first; after the block, as they ended.
        directory: Where their logs are.

    Raises:
        InvalidArgumentError: There is no such model, too few nodes, or an option that the
            cluster sets itself.
    """

    def __init__(
        self,
        model: Path | str = "default",
        *,
        prefill: int = 1,
        decode: int = 1,
        router_options: Mapping[str, object] | None = None,
        prefill_options: Mapping[str, object] | None = None,
        decode_options: Mapping[str, object] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._nodes: list[DaemonKind] = []
        counts: dict[DaemonKind, int] = {"prefill": prefill, "decode": decode}
        for kind, count in counts.items():
            if count < 1:
                raise invalid(kind, count, "at least 1")
            self._nodes += [kind] * count
        self._options: dict[DaemonKind, Mapping[str, object]] = {
            "router": router_options or {},
            "prefill": prefill_options or {},
            "decode": decode_options or {},
        }
        for options in self._options.values():
            _check_options(options)
        self._model = _model_directory(model)
        self._start_timeout_s = start_timeout_s
        self.processes: list[DaemonProcess] = []
        self._started = 0

    def __enter__(self) -> Self:
        self.processes = []
        self.directory = Path(tempfile.mkdtemp(prefix="splitserve-logs-"))
        # The kernel ends a daemon with the *thread* that started it, so that thread lives as
        # long as the cluster, whichever thread enters it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="splitserve-starter")
        try:
            deadline = time.monotonic() + self._start_timeout_s
            self._await_ready(self._start_all(["router"]), deadline)
            nodes = self._start_all(self._nodes)
            self._await_ready(nodes, deadline)
            self._await_joined(nodes, deadline)
            self._await_healthy(deadline)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failed = isinstance(error, Exception)
        with ExitStack() as stack:
            # In reverse: wait for a start that Ctrl-C has interrupted, so that its daemon is in
            # the list; stop all; and only then let go of the thread, whose end the daemons
            # would take for a second signal.
            stack.callback(self._starter.shutdown)
            stack.callback(stop_daemons, self.processes)
            self._starter.submit(lambda: None).result()
        if failed and error is not None:
            error.add_note(f"the daemons' logs are in {self.directory}")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def address(self) -> str:
        """The router's ``host:port``."""
        return self.processes[0].address

    def client(self) -> Client:
        """A client of the router; close it, or use it in a ``with`` block."""
        return Client(self.address)

    def start_node(self, kind: NodeKindName, **options: object) -> DaemonProcess:
        """Adds a node and waits until it serves.

        Args:
            kind: Which half of the work it does.
            options: Beside those that all nodes of its kind have, and before them.

        Raises:
            UnavailableError: It did not get to serve.
        """
        _check_options(options)
        deadline = time.monotonic() + self._start_timeout_s
        [node] = self._start_all([kind], options)
        try:
            self._await([node], node.ready, deadline)
            self._await_joined([node], deadline)
        except BaseException:
            self.stop_node(node)
            raise
        return node

    def stop_node(self, node: DaemonProcess, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Drains a node and takes it out of `processes`; one that has died is only taken out."""
        stop_daemons([node], timeout_s)
        self.processes.remove(node)

    def generate(
        self, prompts: Sequence[str], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Answers many prompts; returns the answers, ``n`` for each, in the prompts' order.

        In a running event loop, use `AsyncClient` with `address` instead.

        Raises:
            SplitserveError: A request failed; the others are cancelled.
        """
        console = Console(stderr=True)
        hidden = len(prompts) < 2 or not console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
            task = progress.add_task("prompts", total=len(prompts))
            return asyncio.run(
                _generate_all(self.address, prompts, sampling, lambda: progress.advance(task))
            )

    def _start_all(
        self, kinds: Sequence[DaemonKind], extra: Mapping[str, object] | None = None
    ) -> list[DaemonProcess]:
        def start(kind: DaemonKind) -> DaemonProcess:
            options: dict[str, object] = {"model": self._model, "listen": "127.0.0.1:0"}
            if kind != "router":
                options["router"] = self.address
            self._started += 1
            daemon = DaemonProcess.start(
                kind,
                f"{kind}-{self._started}",
                {**options, **self._options[kind], **(extra or {})},
                self.directory,
            )
            self.processes.append(daemon)
            return daemon

        return [self._starter.submit(start, kind).result() for kind in kinds]

    def _await_ready(self, daemons: Sequence[DaemonProcess], deadline: float) -> None:
        for daemon in daemons:
            self._await(daemons, daemon.ready, deadline)

    def _await_joined(self, nodes: Sequence[DaemonProcess], deadline: float) -> None:
        """Waits until the router says that these nodes serve."""
        with self.client() as client:
            watched = [self.processes[0], *nodes]
            self._await(watched, lambda: _all_serving(client, nodes), deadline)

    def _await_healthy(self, deadline: float) -> None:
        """Waits until the router itself says that it can serve."""
        with open_sync_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            self._await(self.processes, lambda: _healthy(health), deadline)

    def _await(
        self, watched: Sequence[DaemonProcess], done: Callable[[], bool], deadline: float
    ) -> None:
        while not done():
            for daemon in watched:
                daemon.check_alive()
            if time.monotonic() > deadline:
                missing = [d.log_path.stem for d in watched if not d.address]
                raise UnavailableError(
                    f"the cluster did not serve within {self._start_timeout_s:g} s; "
                    f"{'not ready: ' + ', '.join(missing) if missing else 'not all nodes serve'}"
                )
            time.sleep(POLL_INTERVAL_S)


def _all_serving(client: Client, nodes: Sequence[DaemonProcess]) -> bool:
    try:
        status = client.status(timeout=POLL_TIMEOUT_S)
    except SplitserveError:
        return False
    serving = {node.info.address for node in status.nodes if node.serving}
    return serving.issuperset(node.address for node in nodes)


def _healthy(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=POLL_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _generate_all(
    address: str,
    prompts: Sequence[str],
    sampling: SamplingParams | None,
    on_done: Callable[[], None],
) -> list[Completion]:
    completions: dict[int, list[Completion]] = {}
    numbered = enumerate(prompts)

    async def answer_some(client: AsyncClient) -> None:
        for index, prompt in numbered:
            completions[index] = await client.generate(prompt, sampling=sampling).completions()
            on_done()

    async with AsyncClient(address) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MAX_CONCURRENT_PROMPTS, len(prompts))):
                    group.create_task(answer_some(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [answer for index in range(len(prompts)) for answer in completions[index]]


def _check_options(options: Mapping[str, object]) -> None:
    for name in OWN_OPTIONS:
        if name in options:
            raise InvalidArgumentError(f"{name}: the cluster sets this option itself")


def _model_directory(model: Path | str) -> Path:
    if model == "default":
        # Reads GGUF through transformers, which takes seconds: only who asks for it pays.
        from splitserve.model.importer import default_model

        return default_model()
    path = Path(model)
    if not path.is_dir():
        raise InvalidArgumentError(f"model: {str(path)!r} is not a directory")
    return path.resolve()
