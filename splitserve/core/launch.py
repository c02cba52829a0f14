"""A node whose ranks somebody else starts, one by one and on any hosts, as torchrun does."""

from collections.abc import Mapping
from dataclasses import dataclass

from splitserve.core.errors import invalid


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says to one rank. Rank 0 is the node's daemon.

    Attributes:
        rank: This process's, ``RANK``.
        num_ranks: How many there are, ``WORLD_SIZE``.
        local_ranks: How many of them run on this host, ``LOCAL_WORLD_SIZE``.
        host: Where rank 0 runs, ``MASTER_ADDR``.
        port: Where the others find it there: ``MASTER_PORT``, or the one after it where torchrun
            holds that itself.
        job: The launcher's name for all this, ``TORCHELASTIC_RUN_ID``.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """

    rank: int
    num_ranks: int
    local_ranks: int
    host: str
    port: int
    job: str = ""

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("WORLD_SIZE", self.num_ranks, 1, None),
            ("RANK", self.rank, 0, self.num_ranks - 1),
            ("LOCAL_WORLD_SIZE", self.local_ranks, 1, self.num_ranks),
            ("MASTER_PORT", self.port, 1, 65535),
        ):
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"{low} to {high}"
                raise invalid(name, value, allowed)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        """Reads what torchrun sets, or what is set by hand.

        Raises:
            InvalidArgumentError: A variable is missing, or is not what it should be.
        """

        def text(name: str) -> str:
            value = environment.get(name, "")
            if not value:
                raise invalid(name, value, "what torchrun sets; --launcher torchrun needs it")
            return value

        def number(name: str) -> int:
            value = text(name)
            if not value.isdecimal():
                raise invalid(name, value, "a whole number")
            return int(value)

        # torchrun's agent has a store of its own on that port.
        taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=number("RANK"),
            num_ranks=number("WORLD_SIZE"),
            local_ranks=number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else 1,
            host=text("MASTER_ADDR"),
            port=number("MASTER_PORT") + taken,
            job=environment.get("TORCHELASTIC_RUN_ID", ""),
        )

    @property
    def address(self) -> str:
        """Where rank 0 waits for the others, ``host:port``."""
        return f"{self.host}:{self.port}"
