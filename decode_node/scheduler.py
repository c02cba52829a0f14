"""Decode: continuous batching; every request's blocks were reserved before it came here."""

from itertools import islice

from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.request import Progress, Request, RequestKey, TokenLogprob
from splitserve.engine.batch import Batch, BatchRow, StepOutput
from splitserve.engine.requests import LiveRequests
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache


class DecodeScheduler:
    """Steps every running request by one token; requests join and leave between steps.

    The import queue admits a request only with blocks for all its growth and a place in the
    batch, so nothing here can run out.

    Args:
        blocks: The node's blocks.
        prefixes: Learns of what answers leave.
        eos_token_ids: Tokens that end an answer.
        depth: Steps that may be under way at once; the requests are shared out to them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prefixes: PrefixCache,
        eos_token_ids: frozenset[int],
        depth: int = 1,
    ) -> None:
        self._depth = depth
        self._eos_token_ids = eos_token_ids
        self._running = LiveRequests(blocks, prefixes)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Takes a request whose KV is here, all but its last token's."""
        assert request.computed == len(request.token_ids) - 1
        self._running.add(request)

    def schedule(self) -> Batch | None:
        """One token of every running request, or of one stage's share of them."""
        share = -(-len(self._running) // self._depth)
        idle = (request for request in self._running if not self._running.in_step(request))
        rows = tuple(BatchRow.of(request, 1) for request in islice(idle, share))
        if not rows:
            return None
        batch = Batch(rows)
        self._running.begin_step(batch)
        return batch

    def update(self, batch: Batch, output: StepOutput) -> list[Progress]:
        """Takes a step's tokens."""
        self._running.end_step(batch)
        news = []
        for row, (sample,) in zip(batch.rows, output.samples, strict=True):
            request = self._running.get(row.key)
            if request is not None:
                news.append(self._next_token(request, sample))
        return news

    def finish(self, key: RequestKey) -> None:
        """Drops a request."""
        self._running.drop(key)

    def _next_token(self, request: Request, sample: TokenLogprob) -> Progress:
        finish_reason = request.append(sample.token_id, self._eos_token_ids)
        if finish_reason is not None:
            request.stamp(LifetimeEventKind.DECODE_END)
            self._running.drop(request.key)
        return request.tell(sample, finish_reason)
