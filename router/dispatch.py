"""Which node: the one with the least to do for it that has room, first come first served."""

import asyncio
from collections.abc import Callable, Collection

from router.attempts import Attempt
from router.members import Members
from router.prefixes import PromptKeys
from router.session import NodeSession
from splitserve.core.config import OVERLOAD_PAUSE_S
from splitserve.core.errors import UnavailableError
from splitserve.core.node import NodeKind


class Dispatcher:
    """Places requests on nodes.

    Args:
        members: Who is there.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        # Fair locks: whoever holds one is first in the line for nodes of that kind.
        self._first = {kind: asyncio.Lock() for kind in NodeKind}

    async def place(
        self,
        kind: NodeKind,
        prompt: PromptKeys,
        start: Callable[[NodeSession], Attempt],
        avoid: Collection[NodeSession] = (),
    ) -> Attempt:
        """Starts where least has to be done; waits while all nodes of that kind are full.

        Args:
            kind: Which half of the work.
            prompt: What the node is to have the KV of; best if it has some of it already.
            start: Gives the chosen node the work, without delay.
            avoid: Nodes taken only if there are no others.

        Raises:
            UnavailableError: There is no node of that kind.
        """
        async with self._first[kind]:
            while True:
                if session := self._pick(kind, prompt, avoid):
                    return start(session)
                try:
                    # A node that has refused is asked again after a while; no event tells.
                    async with asyncio.timeout(OVERLOAD_PAUSE_S):
                        await self._members.room(kind)
                except TimeoutError:
                    continue

    def pick_now(self, kind: NodeKind, prompt: PromptKeys) -> NodeSession | None:
        """The node that `place` would choose, if nobody waits for one and there is room."""
        if self._first[kind].locked() or not self._members.usable(kind):
            return None
        return self._pick(kind, prompt, ())

    def _pick(
        self, kind: NodeKind, prompt: PromptKeys, avoid: Collection[NodeSession]
    ) -> NodeSession | None:
        usable = self._members.usable(kind)
        if not usable:
            raise UnavailableError(f"no {kind.label} node is joined")
        free = [session for session in usable if session.attempts.has_room]
        preferred = [session for session in free if session not in avoid] or free
        return min(preferred, key=lambda session: session.cost(prompt), default=None)
