"""The requests alive on a node, and when their blocks may come back."""

from collections import Counter
from collections.abc import Iterator

from splitserve.core.request import Request, RequestKey, RequestStatus
from splitserve.engine.batch import Batch, BatchRow
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache


class LiveRequests:
    """A node's requests by key, in the order they came.

    A request that is dropped while steps compute it keeps its blocks until those are over: the
    workers still write to them.

    Args:
        blocks: The node's blocks.
        prefixes: Learns of every block that a step has filled.
    """

    def __init__(self, blocks: BlockManager, prefixes: PrefixCache) -> None:
        self._blocks = blocks
        self._prefixes = prefixes
        self._by_key: dict[RequestKey, Request] = {}
        # Tokens that steps under way compute.
        self._under_way: Counter[RequestKey] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_key.values())

    def add(self, request: Request) -> None:
        """Takes a request, which already owns what blocks it needs."""
        assert request.key not in self._by_key, "a key is never used twice"
        request.status = RequestStatus.RUNNING
        self._by_key[request.key] = request

    def in_step(self, request: Request) -> bool:
        """Whether a step under way computes the request."""
        return self._under_way[request.key] > 0

    def next_row(self, request: Request, most: int) -> BatchRow | None:
        """The request's next tokens, at most so many; None if steps under way have them all."""
        ahead = self._under_way[request.key]
        left = len(request.token_ids) - request.computed - ahead
        return BatchRow.of(request, min(most, left), ahead) if left else None

    def begin_step(self, batch: Batch) -> None:
        """From here on the workers may write to the blocks of the batch's requests."""
        for row in batch.rows:
            self._under_way[row.key] += len(row.token_ids)

    def end_step(self, batch: Batch) -> None:
        """A step is over: its requests have more KV, or are gone if they were dropped meanwhile."""
        for row in batch.rows:
            request = self._by_key[row.key]
            request.computed += len(row.token_ids)
            self._prefixes.remember(request)
            self._under_way[row.key] -= len(row.token_ids)
            if not self._under_way[row.key]:
                del self._under_way[row.key]
                if request.status is RequestStatus.FINISHED:
                    self.drop(row.key)

    def get(self, key: RequestKey) -> Request | None:
        """The request, unless it is unknown or dropped."""
        request = self._by_key.get(key)
        return None if request is None or request.status is RequestStatus.FINISHED else request

    def drop(self, key: RequestKey) -> None:
        """Ends a request; its blocks come back now, or after the steps that compute it."""
        request = self._by_key.get(key)
        if request is None:
            return
        request.status = RequestStatus.FINISHED
        if not self._under_way[key]:
            del self._by_key[key]
            self._blocks.free(request.block_ids)

    def hand_over(self, key: RequestKey) -> Request:
        """Gives a request up together with its blocks, which are the caller's from here on."""
        request = self._by_key.pop(key)
        request.status = RequestStatus.FINISHED
        return request
