"""The bounded queue of requests whose KV is yet to be pulled.

Pull is the back-pressure of the whole system: a request is pulled only once this node can hold
it and all its growth; until then its KV waits in prefill memory.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitserve.core.config import NodeConfig
from splitserve.core.errors import InternalError, ResourceExhaustedError, SplitserveError, invalid
from splitserve.core.lifetime import KvTransfer, LifetimeEventKind
from splitserve.core.request import Progress, Request, RequestStatus
from splitserve.kv.blocks import BlockManager

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


class ImportQueue:
    """Admits, pulls and hands over to the scheduler; all of it beside the step loop.

    Args:
        config: Its limits.
        blocks: The node's blocks.
        num_running: Requests in the running batch.
        pull: Copies a request's KV into its blocks and proves it intact. It returns, or raises,
            only once nothing writes to the blocks any more, also when cancelled.
        add: Takes a request that is ready to run.
        publish: Takes its news.
    """

    def __init__(
        self,
        config: NodeConfig,
        blocks: BlockManager,
        num_running: Callable[[], int],
        pull: Callable[[Request, Source], Awaitable[KvTransfer]],
        add: Callable[[Request], None],
        publish: Callable[[list[Progress]], None],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._num_running = num_running
        self._pull = pull
        self._add = add
        self._publish = publish
        self._waiting: OrderedDict[str, tuple[Request, Source]] = OrderedDict()
        self._importing: dict[str, asyncio.Task[None]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or a place."""
        return len(self._waiting)

    @property
    def num_importing(self) -> int:
        """Requests being pulled."""
        return len(self._importing)

    def submit(self, request: Request, source: Source) -> None:
        """Queues a request.

        Raises:
            ResourceExhaustedError: The queue is full.
            InvalidArgumentError: The request can never fit this node.
        """
        limit = self._blocks.num_blocks * self._blocks.block_size
        if not 2 <= len(request.token_ids) <= request.max_length <= limit:
            raise invalid("prompt + max_tokens", request.max_length, f"at most {limit} here")
        if len(self._waiting) >= self._config.max_queued_requests:
            raise ResourceExhaustedError(
                f"queue: {len(self._waiting)} requests wait to be pulled; "
                f"max_queued_requests is {self._config.max_queued_requests}"
            )
        self._waiting[request.ticket] = (request, source)
        self.admit()

    def cancel(self, ticket: str) -> None:
        """Drops a request; if it is being pulled, its blocks come back once the copy is over."""
        self._waiting.pop(ticket, None)
        if task := self._importing.get(ticket):
            task.cancel()
        self.admit()

    def admit(self) -> None:
        """Starts every pull that fits, oldest first; call when blocks or places came back."""
        while self._waiting and len(self._importing) < self._config.max_concurrent_pulls:
            ticket, (request, source) = next(iter(self._waiting.items()))
            needed = self._blocks.blocks_for(request.max_length)
            places = self._config.max_batch_size - self._num_running() - len(self._importing)
            if places < 1 or needed > self._blocks.num_free:
                return
            del self._waiting[ticket]
            request.block_ids = self._blocks.allocate(needed)
            request.status = RequestStatus.IMPORTING
            self._importing[ticket] = asyncio.create_task(self._import(request, source))

    async def close(self) -> None:
        """Ends every pull; for a node that stops."""
        self._waiting.clear()
        tasks = list(self._importing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _import(self, request: Request, source: Source) -> None:
        request.stamp(LifetimeEventKind.MIGRATION_BEGIN)
        try:
            transfer = await self._pull(request, source)
        except BaseException as error:
            self._blocks.free(request.block_ids)
            if not isinstance(error, asyncio.CancelledError):
                self._publish([request.tell(error=_as_ours(error, request))])
        else:
            request.stamp(LifetimeEventKind.MIGRATION_END, transfer)
            request.computed = len(request.token_ids) - 1
            self._add(request)
        finally:
            del self._importing[request.ticket]
            self.admit()


def _as_ours(error: BaseException, request: Request) -> SplitserveError:
    if isinstance(error, SplitserveError):
        return error
    log.error("a pull failed", extra={"request_id": request.request_id}, exc_info=error)
    return InternalError("the pull failed; the decode node's log has the details")
