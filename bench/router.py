"""How much does the router cost? Against a bare gRPC server of one hop, with the same clients."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.child import Child
from bench.machine import Machine, resident_bytes
from bench.report import Comparison, Comparisons, Report
from bench.rounds import take_turns
from splitserve.core.errors import UnavailableError
from splitserve.model.config import ModelConfig
from splitserve.process import DaemonProcess, stop_daemons

STREAMS = 64
TOKENS = 500
FIRST_TOKENS = 50
PROMPT = "Once upon a time there was a router that knew nothing of tensors. " * 8
START_TIMEOUT_S = 30.0
START_POLL_S = 0.05

RATIO = 0.5


@dataclass(frozen=True, slots=True)
class Relays:
    """Both servers, and the clients that read from either.

    Attributes:
        clients: All streams' clients.
        router: The router's address.
        bare: The peer's.
        router_bytes: Memory of the router before its first request.
    """

    clients: Child
    router: str
    bare: str
    router_bytes: int

    async def relay(self, address: str) -> dict[str, float]:
        """One round of one server: tokens a second, and tokens in a message."""
        told = self.clients.ask(
            what="relay", address=address, streams=STREAMS, tokens=TOKENS, prompt=PROMPT
        )
        total = STREAMS * TOKENS
        return {"rate": total / told["seconds"], "size": total / told["messages"]}

    def first_token_s(self, address: str) -> float:
        """Median time to the first token of requests that are alone."""
        seconds: list[float] = self.clients.ask(
            what="first_token", address=address, prompt=PROMPT, count=FIRST_TOKENS
        )
        return median(seconds)


async def measure(model: Path, rounds: int) -> Report:
    """Answers the question."""
    machine = Machine.here("grpcio", "protobuf")
    config = ModelConfig.from_dir(model)
    sizes: list[float] = []
    added_s: list[float] = []
    with _relays(model) as relays:

        async def ours(_: int) -> float:
            told = await relays.relay(relays.router)
            sizes.append(told["size"])
            return told["rate"]

        async def bare(_: int) -> float:
            return (await relays.relay(relays.bare))["rate"]

        for address in (relays.router, relays.bare):
            relays.first_token_s(address)  # Once unmeasured: connections stand.
        for _ in range(rounds):
            ours_s, bare_s = (relays.first_token_s(a) for a in (relays.router, relays.bare))
            added_s.append(ours_s - bare_s)
        figures = await take_turns(ours, bare, rounds)
    return Report(
        name="router",
        title=f"{STREAMS} streams through the router, beside a bare gRPC hop",
        machine=machine,
        settings={"model": config.name, "streams": STREAMS, "tokens": TOKENS, "rounds": rounds},
        findings=Comparisons(
            "bare hop", [Comparison(f"relay, {STREAMS} streams", "tokens/s", figures, RATIO)]
        ),
        notes={
            "tokens a message": f"router {median(sizes):.2f}, bare hop 1.00",
            "added to the first token": f"{median(added_s) * 1e3:.2f} ms (text of "
            f"{len(PROMPT)} characters tokenised, prefill node asked; median)",
            "router memory after start": f"{relays.router_bytes / 1e6:.0f} MB",
        },
    )


@contextmanager
def _relays(model: Path) -> Iterator[Relays]:
    """Starts everything, and ends it whatever happens."""
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as directory:
        options = {"model": model, "listen": "127.0.0.1:0", "log_level": "WARNING"}
        router = DaemonProcess.start("router", "router", options, Path(directory))
        try:
            _wait_ready(router)
            nodes = Child("bench.relay_nodes", router.address, str(model), str(STREAMS))
            with nodes, Child("bench.relay_bare") as bare, Child("bench.relay_client") as clients:
                nodes.ask()
                yield Relays(clients, router.address, bare.ask(), resident_bytes(router.pid))
        finally:
            stop_daemons([router])


def _wait_ready(router: DaemonProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not router.ready():
        if time.monotonic() > deadline:
            raise UnavailableError(f"router: not ready within {START_TIMEOUT_S:g} s")
        time.sleep(START_POLL_S)
