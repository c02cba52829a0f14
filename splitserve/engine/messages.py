"""What a node and its worker say to each other over their sockets, and how it is framed.

Plain frozen data, pickled: both ends are one release of one program, and nobody else holds the
sockets. A frame is four bytes of length, then the message.
"""

import pickle
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InternalError, SplitserveError, error_from_code
from splitserve.engine.batch import Batch, StepOutput
from splitserve.engine.shape import NodeShape
from splitserve.kv.handle import RankMemory
from splitserve.transfer.transport import PullJob, PullResult

MAX_FRAME_BYTES = 256 * 2**20
"""Largest message; far beyond the largest batch, so that only a broken stream reaches it."""

_HEADER = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker: what it is to be.

    Attributes:
        config: What the node was told.
        shape: What that makes of the node.
        epoch: This start of the node.
        rank: Which of its ranks the worker is.
        host: Where the ranks meet.
        port: The port there.
    """

    config: EngineConfig
    shape: NodeShape
    epoch: str
    rank: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first message: what it has become.

    Attributes:
        memory: Its KV cache, as peers reach it.
        transport: How they do.
        weight_bytes: Memory its weights take.
    """

    memory: RankMemory
    transport: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, as an operator may read it; the worker's log has the traceback.

    As the result of a call it is that pull's; sent by itself it is a worker's last word.
    """

    code: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """An error of ours as it is, any other by its type and first line."""
        if isinstance(error, SplitserveError):
            return cls(error.code, error.message)
        lines = str(error).splitlines() or [""]
        return cls(InternalError.code, f"{type(error).__name__}: {lines[0]}")

    def error(self) -> SplitserveError:
        """The error it stands for."""
        return error_from_code(self.code, self.message)


@dataclass(frozen=True, slots=True)
class Call:
    """Work for a worker: a step on one socket, a pull on the other.

    Of a step's ranks only the one that samples replies.
    """

    call_id: int
    work: Batch | PullJob


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a call."""

    call_id: int
    result: StepOutput | PullResult | Failure


def encode(message: Any) -> bytes:
    """A message as a frame."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(payload) <= MAX_FRAME_BYTES, f"a message of {len(payload):,} bytes"
    return _HEADER.pack(len(payload)) + payload


def take(buffer: bytearray) -> Any | None:
    """Takes one message off a buffer of received bytes; None while it is not all there.

    Raises:
        InternalError: What is there is no frame.
    """
    if len(buffer) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(buffer)
    if size > MAX_FRAME_BYTES:
        raise InternalError(f"a worker's stream is broken: a frame of {size:,} bytes")
    end = _HEADER.size + size
    if len(buffer) < end:
        return None
    message = pickle.loads(memoryview(buffer)[_HEADER.size : end].tobytes())
    del buffer[:end]
    return message


class BlockingChannel:
    """A worker's end of a socket.

    Args:
        fd: The inherited descriptor; the channel's from here on.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive within that time."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def send(self, message: Any) -> None:
        """Sends a message; a node that is gone hears nothing."""
        try:
            self._socket.sendall(encode(message))
        except (ConnectionError, TimeoutError):
            return

    def receive(self) -> Any | None:
        """The next message; None once the node has closed its end."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        payload = self._read(*_HEADER.unpack(header))
        return None if payload is None else pickle.loads(payload)

    def _read(self, size: int) -> bytearray | None:
        # No more than asked for: what is read ahead, `wait` would not see.
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except (ConnectionError, TimeoutError):
                return None
            if not count:
                return None
            rest = rest[count:]
        return data
