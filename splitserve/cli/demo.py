"""``splitserve demo``: from nothing to a streamed answer, and back to nothing."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console

from splitserve.cli.generate import stream_text
from splitserve.cli.progress import progress_bar
from splitserve.cli.status import draw_status
from splitserve.cli.timeline import draw
from splitserve.client import Client
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster
from splitserve.process import DaemonProcess

QUESTION = "What is the capital of France, and what is it famous for?"
SAMPLING = SamplingParams(max_tokens=96, temperature=0.0)

SHARED_MEMORY = Path("/dev/shm")
PROCESSES = Path("/proc")

LEFTOVER_TIMEOUT_S = 5.0
"""How long ended daemons' workers may take to go."""

LEFTOVER_POLL_S = 0.05


@click.command("demo")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of a model; without it, the default model.",
)
@click.option("--use-dummy-weights", is_flag=True, help="Random weights: see it move, not talk.")
def command(model: Path | None, use_dummy_weights: bool) -> None:
    """Starts a cluster on this machine, asks it something and shows what happened."""
    console = Console(highlight=False)
    directory = model or _default_model()
    options = {"use_dummy_weights": use_dummy_weights}
    console.print(f"starting a router, a prefill node and a decode node for {directory.name} …")
    began = time.monotonic()
    with LocalCluster(directory, prefill_options=options, decode_options=options) as cluster:
        console.print(f"serving after {time.monotonic() - began:.1f} s")
        with cluster.client() as client:
            epochs = _converse(client, console)
    console.print()
    if left := leftovers(cluster.processes, epochs):
        raise click.ClickException("left behind: " + ", ".join(left))
    console.print("stopped; no process and no shared memory is left behind")


def leftovers(daemons: Sequence[DaemonProcess], epochs: Iterable[str]) -> list[str]:
    """What ended daemons have left: processes of their sessions, shared memory of their epochs."""
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    sessions = {daemon.pid for daemon in daemons}
    while True:
        left = [f"process {pid}" for pid in _living(sessions)]
        left += [
            str(segment)
            for segment in SHARED_MEMORY.glob("splitserve-*")
            if any(epoch in segment.name for epoch in epochs)
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(LEFTOVER_POLL_S)


def _converse(client: Client, console: Console) -> list[str]:
    """Asks the question and shows everything; returns the nodes' epochs."""
    console.print(f"\n[bold]{QUESTION}[/bold]")
    lifetime = stream_text(
        client.generate(chat=[{"role": "user", "content": QUESTION}], sampling=SAMPLING)
    )
    console.print()
    if lifetime is not None:
        console.print(draw(lifetime))
    status = client.status()
    console.print()
    console.print(draw_status(status))
    return [node.info.epoch for node in status.nodes]


def _default_model() -> Path:
    # Reads GGUF through transformers, which takes seconds: not for who brings a model.
    from splitserve.model.importer import default_model

    with progress_bar("importing the default model") as progress:
        return default_model(progress=progress)


def _living(sessions: set[int]) -> list[int]:
    """Processes of these sessions that run; one that only waits to be reaped does not."""
    living = []
    for stat in PROCESSES.glob("[0-9]*/stat"):
        try:
            # proc_pid_stat(5): the name is in brackets and may hold anything.
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # It went while we looked.
        if int(session) in sessions and state != "Z":
            living.append(int(stat.parent.name))
    return living
