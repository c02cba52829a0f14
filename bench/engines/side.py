"""A side of the engine question, and a peer as one."""

from collections.abc import Sequence
from typing import Any, Protocol

from bench.child import Child
from bench.engines.case import Prompts


class Side(Protocol):
    """Both sides do the same three things."""

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""

    async def hold(self, prompts: Prompts, count: int) -> None:
        """Computes prompts that `decode` continues by up to ``count`` tokens each."""

    async def decode(self, count: int) -> float:
        """Seconds that ``count`` tokens for each held prompt take, all in one batch."""


class ChildSide:
    """A peer in a process of its own, which is stopped whenever it is not asked.

    Whatever an idle peer does, such as spinning for its next step, would be done at our cost.

    Args:
        child: The process.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    def versions(self) -> dict[str, str]:
        """Of what the peer is made of, once it has loaded."""
        return dict(self._ask(what="versions"))

    async def prefill(self, prompt: Sequence[int]) -> float:
        """See `Side`."""
        return float(self._ask(what="prefill", prompt=prompt))

    async def hold(self, prompts: Prompts, count: int) -> None:
        """See `Side`."""
        self._ask(what="hold", prompts=prompts, count=count)

    async def decode(self, count: int) -> float:
        """See `Side`."""
        return float(self._ask(what="decode", count=count))

    def _ask(self, **question: Any) -> Any:
        self._child.resume()
        answer = self._child.ask(**question)
        self._child.pause()
        return answer
