"""How a process that a launcher started as one of a node's ranks becomes that: the rank's end.

It runs the node's own command. It dials rank 0 once for steps, once for pulls and once as its death
pipe, says a line on each about who it is, hears a line, and goes on as a worker that was born with
those three. The node's end is `splitserve.engine.launch`.
"""

import logging
import os
import signal
import socket
import time
from typing import NoReturn

from splitserve.core.config import NodeConfig
from splitserve.core.errors import FailedPreconditionError, UnavailableError
from splitserve.core.launch import Launch
from splitserve.engine.greeting import (
    CHANNELS,
    GREETING_TIMEOUT_S,
    JOIN_RETRY_S,
    JOIN_TIMEOUT_S,
    WELCOME,
    Greeting,
    keep_alive,
)
from splitserve.engine.spawn import signals_held_back, worker_command, worker_environment
from splitserve.kv.memory import sweep_stale

log = logging.getLogger(__name__)


def take_rank(config: NodeConfig) -> NodeConfig:
    """Returns on the rank that is the node; any other becomes its worker and does not return.

    Raises:
        UnavailableError: The node is not there.
        FailedPreconditionError: It does not want this rank.
    """
    launch = config.engine.launch
    if launch is not None and launch.rank > 0:
        _become_worker(launch, config.engine.threads)
    return config


def _become_worker(launch: Launch, threads: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing to tidy up, and no traceback.
    sweep_stale()
    log.info("joining the node", extra={"rank": launch.rank, "at": launch.address})
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    steps, pulls, death = (_join(launch, channel, deadline) for channel in CHANNELS)
    for fd in (fds := (steps.detach(), pulls.detach(), death.detach())):
        os.set_inheritable(fd, True)
    command = worker_command(launch.rank, fds)
    with signals_held_back():
        os.execve(command[0], command, worker_environment(threads))


def _join(launch: Launch, channel: str, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((launch.host, launch.port), GREETING_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"MASTER_ADDR: no node at {launch.address} within {JOIN_TIMEOUT_S:g} s "
                    f"({error.strerror or error}); rank 0 has to run there"
                ) from error
            time.sleep(JOIN_RETRY_S)
    try:
        connection.sendall(Greeting.of(launch, channel).encode())
        answer = b""
        # Byte by byte: what follows the line is the worker's.
        while not answer.endswith(b"\n") and (more := connection.recv(1)):
            answer += more
    except OSError as error:
        raise UnavailableError(f"{launch.address} does not answer ({error})") from error
    if (said := answer.decode(errors="replace").strip()) != WELCOME:
        raise FailedPreconditionError(said or f"{launch.address} has hung up")
    connection.settimeout(None)
    keep_alive(connection)
    return connection
