"""The interface of a way to copy KV: an exporter on the source rank, an importer on the target."""

from dataclasses import dataclass
from typing import Protocol

from splitserve.kv.handle import KvHandle, RankMemory


@dataclass(frozen=True, slots=True)
class PullJob:
    """What one target rank pulls.

    Attributes:
        handle: Where the source's blocks lie.
        block_ids: Target blocks in token order, enough for ``handle.num_tokens``.
        first_token: Which token is the first to be pulled; what is before it is there already.
        copies: Target blocks to copy afterwards, ``(from, to)``.
    """

    handle: KvHandle
    block_ids: tuple[int, ...]
    first_token: int = 0
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did.

    Attributes:
        size_bytes: Bytes written into the target's cache.
        duration_ns: Time the copy took.
    """

    size_bytes: int
    duration_ns: int


class KVExporter(Protocol):
    """The source rank's side."""

    def export(self) -> RankMemory:
        """How a peer reaches this rank's cache; the same for all tickets."""

    def close(self) -> None:
        """Takes the memory back; peers that mapped it keep what they mapped."""


class KVImporter(Protocol):
    """The target rank's side. Runs beside the step loop, in a thread of its own."""

    def pull(self, job: PullJob) -> PullResult:
        """Copies a ticket's KV into this rank's blocks; blocking.

        Raises:
            UnavailableError: The source's memory cannot be reached.
            FailedPreconditionError: Its shape does not fit this model's.
        """

    def close(self) -> None:
        """Lets go of every mapped peer."""
