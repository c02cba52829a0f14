"""Prefill: first come, first served, in chunks under a token budget."""

from collections import OrderedDict
from collections.abc import Iterator

from prefill_node.leases import Leases
from splitserve.core.config import NodeConfig
from splitserve.core.errors import ResourceExhaustedError, invalid
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.request import Progress, Request, RequestKey, RequestStatus, TokenLogprob
from splitserve.engine.batch import Batch, BatchRow, StepOutput
from splitserve.engine.requests import LiveRequests
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache


class PrefillScheduler:
    """Runs prompts in the order they came; chunks of several share a step.

    A prompt starts only if its blocks fit beside the owned and leased ones, so a node whose
    leased KV fills its cache takes no new prompt: that is the back-pressure of a full decode side.

    Args:
        config: Its limits.
        blocks: The node's blocks.
        prefixes: Finds what earlier prompts have left of a new one.
        leases: Takes over the blocks of a finished prompt.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(
        self,
        config: NodeConfig,
        blocks: BlockManager,
        prefixes: PrefixCache,
        leases: Leases,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._leases = leases
        self._eos_token_ids = eos_token_ids
        self._waiting: OrderedDict[RequestKey, Request] = OrderedDict()
        self._running = LiveRequests(blocks, prefixes)

    @property
    def num_waiting(self) -> int:
        """Prompts that have not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts that have begun."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queues a prompt.

        Raises:
            ResourceExhaustedError: The queue is full.
            InvalidArgumentError: The prompt is empty or can never fit.
        """
        length, limit = len(request.token_ids), self._blocks.num_blocks * self._blocks.block_size
        if not 1 <= length <= limit:
            raise invalid("prompt tokens", length, f"1 to {limit} on this node")
        if len(self._waiting) >= self._config.max_queued_requests:
            raise ResourceExhaustedError(
                f"queue: {len(self._waiting)} prompts wait; "
                f"max_queued_requests is {self._config.max_queued_requests}"
            )
        self._waiting[request.key] = request

    def schedule(self) -> Batch | None:
        """The next chunk of every prompt that the budget reaches, oldest first."""
        rows: list[BatchRow] = []
        budget = self._config.max_tokens_per_batch
        for request in self._begun_then_waiting():
            row = self._running.next_row(request, budget)
            if row is not None:
                rows.append(row)
                budget -= len(row.token_ids)
            if budget == 0 or len(rows) == self._config.max_batch_size:
                break
        if not rows:
            return None
        batch = Batch(tuple(rows))
        self._running.begin_step(batch)
        return batch

    def update(self, batch: Batch, output: StepOutput) -> list[Progress]:
        """Takes a step's first tokens: a prompt that is done is finished or leased."""
        self._running.end_step(batch)
        news = []
        for row, samples in zip(batch.rows, output.samples, strict=True):
            request = self._running.get(row.key)
            if request is None:
                continue
            self._leases.grow(request.ticket, request.computed)
            if samples:
                news += self._first_tokens(request, samples)
            elif request.events:
                news.append(request.tell())
        return news

    def lease_early(self, ticket: str) -> None:
        """Leases a prompt that is still computed, if that is one; it grows from then on."""
        for request in self._running:
            live = request.status is not RequestStatus.FINISHED
            if request.ticket == ticket and live and ticket not in self._leases:
                self._leases.grant_early(ticket, request.block_ids, request.computed)

    def finish(self, key: RequestKey) -> None:
        """Drops a prompt, begun or not."""
        self._waiting.pop(key, None)
        self._running.drop(key)

    def _begun_then_waiting(self) -> Iterator[Request]:
        """Prompts by age; those that wait begin as they are reached."""
        yield from tuple(self._running)
        while (admitted := self._admit()) is not None:
            yield admitted

    def _admit(self) -> Request | None:
        """Starts the oldest waiting prompt if its blocks fit; nobody overtakes it."""
        if not self._waiting:
            return None
        request = next(iter(self._waiting.values()))
        length = len(request.token_ids)
        # The last token is computed in any case: the next one is sampled from what comes out.
        found = self._prefixes.find(request, length - 1)
        needed = self._blocks.blocks_for(length)
        if not self._blocks.fit(needed, found):
            return None
        del self._waiting[request.key]
        request.block_ids = self._blocks.allocate(needed, found)
        self._prefixes.begin(found, request)
        request.stamp(LifetimeEventKind.PREFILL_BEGIN)
        self._running.add(request)
        return request

    def _first_tokens(self, request: Request, samples: tuple[TokenLogprob, ...]) -> list[Progress]:
        """One token of each answer; the KV is leased if any of them goes on."""
        request.stamp(LifetimeEventKind.PREFILL_END)
        ends = [request.ends_with(sample.token_id, self._eos_token_ids) for sample in samples]
        if None in ends:
            self._running.hand_over(request.key)
            self._leases.grant(request.ticket, request.block_ids, request.computed)
        else:
            self._leases.cancel(request.ticket)
            self._running.drop(request.key)
        news = [
            request.tell(sample, end, index=index)
            for index, sample, end in zip(request.indexes, samples, ends, strict=True)
        ]
        news[0].cached_tokens = request.cached
        return news
