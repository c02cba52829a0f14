"""The bounded queue of requests whose KV is yet to be pulled.

Pull is the back-pressure of the whole system: a request is pulled only once this node can hold
it and all its growth; until then its KV waits in prefill memory.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from splitserve.core.config import NodeConfig
from splitserve.core.errors import (
    InternalError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
    invalid,
)
from splitserve.core.lifetime import KvTransfer, LifetimeEventKind
from splitserve.core.request import Progress, Request, RequestStatus
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's KV is to be pulled from.

    Attributes:
        address: Where the prefill node serves `KvSource`.
        epoch: The start of it that leased the KV.
    """

    address: str
    epoch: str


@dataclass(slots=True, eq=False)
class Import:
    """Answers that go on from one leased KV: one pull, and full blocks that all of them share.

    Attributes:
        answers: Equal but for their index and last token, which has no KV yet; at least one.
        source: Where the KV is to be pulled from.
        num_tokens: Tokens whose KV is pulled.
        early: Whether the prompt is still computed, and the answers' last token yet to come.
        block_ids: The blocks that it is pulled into, in token order.
        cached_tokens: Tokens at the beginning of which the node has the KV already.
        copies: Blocks to copy afterwards, ``(from, to)``: each answer writes to its own last one.
        cancelled: Indexes of answers that nobody wants any more.
    """

    answers: Sequence[Request]
    source: Source
    num_tokens: int
    early: bool = False
    block_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    cancelled: set[int] = field(default_factory=set)

    @property
    def ticket(self) -> str:
        """The hand-over that it is."""
        return self.answers[0].ticket

    @property
    def wanted(self) -> list[Request]:
        """The answers that are not cancelled."""
        return [answer for answer in self.answers if answer.indexes[0] not in self.cancelled]

    def num_blocks(self, blocks: BlockManager) -> int:
        """Blocks for the wanted answers with all their growth."""
        shared = self.num_tokens // blocks.block_size
        each = blocks.blocks_for(self.answers[0].max_length) - shared
        return shared + each * len(self.wanted)

    def take(self, blocks: BlockManager, found: list[int]) -> None:
        """Drops what is not wanted, and takes blocks for the rest.

        Args:
            blocks: The node's.
            found: Those that hold the first tokens already.

        Raises:
            ResourceExhaustedError: There are too few; none was taken.
        """
        taken = blocks.allocate(self.num_blocks(blocks), found)
        self.cached_tokens = len(found) * blocks.block_size
        self.answers = self.wanted
        num_shared = self.num_tokens // blocks.block_size
        shared, own = taken[:num_shared], taken[num_shared:]
        blocks.share(shared, len(self.answers))
        each = len(own) // len(self.answers)
        for i, answer in enumerate(self.answers):
            answer.block_ids = [*shared, *own[i * each : (i + 1) * each]]
            answer.status = RequestStatus.IMPORTING
        first, *others = (answer.block_ids for answer in self.answers)
        self.block_ids = tuple(first[: blocks.blocks_for(self.num_tokens)])
        if len(self.block_ids) > num_shared:
            self.copies = tuple((first[num_shared], other[num_shared]) for other in others)


class ImportQueue:
    """Admits, pulls and hands over to the scheduler; all of it beside the step loop.

    Args:
        config: Its limits.
        blocks: The node's blocks.
        prefixes: Finds what earlier requests have left of a new one.
        num_running: Requests in the running batch.
        pull: Copies KV into an import's blocks and proves it intact. It returns, or raises, only
            once nothing writes to the blocks any more, also when cancelled.
        add: Takes an answer that is ready to run.
        publish: Takes its news.
    """

    def __init__(
        self,
        config: NodeConfig,
        blocks: BlockManager,
        prefixes: PrefixCache,
        num_running: Callable[[], int],
        pull: Callable[[Import], Coroutine[Any, Any, KvTransfer]],
        add: Callable[[Request], None],
        publish: Callable[[list[Progress]], None],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._num_running = num_running
        self._pull = pull
        self._add = add
        self._publish = publish
        self._waiting: OrderedDict[str, Import] = OrderedDict()
        self._importing: dict[str, tuple[Import, asyncio.Task[KvTransfer]]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or a place."""
        return len(self._waiting)

    @property
    def num_importing(self) -> int:
        """Requests being pulled."""
        return len(self._importing)

    def submit(self, item: Import) -> None:
        """Queues an import.

        Raises:
            ResourceExhaustedError: The queue is full.
            UnavailableError: An earlier pull for its ticket, cancelled, is not over yet.
            InvalidArgumentError: It can never fit this node.
        """
        self._check(item)
        if item.ticket in self._importing:
            raise UnavailableError("an earlier pull of this request has not ended here yet")
        if item.early and (self._waiting or not self._try(item)):
            raise ResourceExhaustedError("blocks: no room for a prompt that is still computed")
        if item.early:
            return
        if len(self._waiting) >= self._config.max_queued_requests:
            raise ResourceExhaustedError(
                f"queue: {len(self._waiting)} requests wait to be pulled; "
                f"max_queued_requests is {self._config.max_queued_requests}"
            )
        self._waiting[item.ticket] = item
        self.admit()

    def first_tokens(self, ticket: str, tokens: Mapping[int, int]) -> None:
        """The prompt of an early import is complete.

        Args:
            ticket: The import's; unknown ones are ignored.
            tokens: The next token of each answer that goes on; others are dropped.
        """
        item, pull = self._importing.get(ticket, (None, None))
        if item is None or pull is None or not item.early:
            return
        item.early = False
        for answer in item.answers:
            index = answer.indexes[0]
            if index in tokens:
                answer.token_ids.append(tokens[index])
            else:
                item.cancelled.add(index)
        item.answers[0].stamp(LifetimeEventKind.MIGRATION_BEGIN)
        if pull.done():
            self._finish(item, pull)

    def cancel(self, ticket: str, indexes: Collection[int]) -> None:
        """Drops answers; of those being pulled, blocks come back once the copy is over."""
        item, pull = self._importing.get(ticket, (self._waiting.get(ticket), None))
        if item is not None:
            item.cancelled.update(indexes)
            if not item.wanted:
                self._waiting.pop(ticket, None)
                if pull is not None and not pull.cancel() and item.early:
                    # Pulled, and waiting for what will not come.
                    item.early = False
                    self._finish(item, pull)
        self.admit()

    def admit(self) -> None:
        """Starts every pull that fits, oldest first; call when blocks or places came back."""
        while self._waiting:
            ticket, item = next(iter(self._waiting.items()))
            if not self._try(item):
                return
            del self._waiting[ticket]

    def _try(self, item: Import) -> bool:
        """Starts a pull if it fits; says whether it did."""
        # Early pulls are as slow as their prompts: they have places of their own.
        pulls = sum(other.early == item.early for other, _ in self._importing.values())
        importing = sum(len(other.answers) for other, _ in self._importing.values())
        places = self._config.max_batch_size - self._num_running() - importing
        if pulls >= self._config.max_concurrent_pulls or len(item.wanted) > places:
            return False
        found = self._prefixes.find(item.answers[0], item.num_tokens)
        if not self._blocks.fit(item.num_blocks(self._blocks), found):
            return False
        item.take(self._blocks, found)
        self._prefixes.begin(found, *item.answers)
        if not item.early:
            item.answers[0].stamp(LifetimeEventKind.MIGRATION_BEGIN)
        pull = asyncio.create_task(self._pull(item))
        # No coroutine around it: one that is cancelled before its first step never runs.
        pull.add_done_callback(partial(self._pulled, item))
        self._importing[item.ticket] = (item, pull)
        return True

    async def close(self) -> None:
        """Ends every pull; for a node that stops."""
        self._waiting.clear()
        tasks = [task for _, task in self._importing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, item: Import) -> None:
        limit, block_size = self._blocks.num_blocks, self._blocks.block_size
        length, most = item.answers[0].max_length, limit * block_size
        if not 1 <= item.num_tokens < length <= most:
            raise invalid("prompt + max_tokens", length, f"at most {most} here")
        count = len(item.answers)
        if count > self._config.max_batch_size:
            raise invalid("n", count, f"at most {self._config.max_batch_size} on a decode node")
        if (needed := item.num_blocks(self._blocks)) > limit:
            raise invalid(
                "n", count, f"answers that fit a decode node's {limit} blocks; they need {needed}"
            )

    def _pulled(self, item: Import, pull: "asyncio.Task[KvTransfer]") -> None:
        failed = pull.cancelled() or pull.exception() is not None
        if failed or not item.early:
            self._finish(item, pull)

    def _finish(self, item: Import, pull: "asyncio.Task[KvTransfer]") -> None:
        first = item.answers[0]
        error = asyncio.CancelledError() if pull.cancelled() else pull.exception()
        if error is None:
            first.stamp(LifetimeEventKind.MIGRATION_END, pull.result())
            first.stamp(LifetimeEventKind.DECODE_BEGIN)
            self._run(item)
        else:
            for answer in item.answers:
                self._blocks.free(answer.block_ids)
            if not pull.cancelled():
                self._publish([first.tell(error=_as_ours(error, first))])
        # Only now: what was freed above may admit others, and this one still counts there.
        del self._importing[item.ticket]
        self.admit()

    def _run(self, item: Import) -> None:
        wanted = item.wanted
        for answer in item.answers:
            if answer in wanted:
                answer.computed = item.num_tokens
                self._prefixes.remember(answer)
                self._add(answer)
            else:
                self._blocks.free(answer.block_ids)


def _as_ours(error: BaseException, request: Request) -> SplitserveError:
    if isinstance(error, SplitserveError):
        return error
    log.error("a pull failed", extra={"request_id": request.request_id}, exc_info=error)
    return InternalError("the pull failed; the decode node's log has the details")
