"""What a decode node does for its routers."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

from decode_node.imports import Import, ImportQueue, Source
from decode_node.pull import Puller
from decode_node.scheduler import DecodeScheduler
from splitserve.core.request import Request
from splitserve.engine.node import Node
from splitserve.engine.work import WorkStreams
from splitserve.rpc.convert import answers_from_proto
from splitserve.v1 import work_pb2, work_pb2_grpc


class DecodeRole:
    """KV in, tokens out.

    Attributes:
        imports: Requests whose KV is yet to be pulled.
        scheduler: The node's scheduler.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._puller = Puller(node.info.epoch, node.executor)
        executor = node.executor
        self.scheduler = DecodeScheduler(
            node.blocks, node.prefixes, executor.shape.model.eos_token_ids, executor.depth
        )
        self.imports = ImportQueue(
            node.config,
            node.blocks,
            node.prefixes,
            lambda: self.scheduler.num_running,
            self._puller.pull,
            self._run,
            lambda news: node.work.publish(news),
        )
        node.blocks.on_free = self.imports.admit

    @property
    def idle(self) -> bool:
        """Whether no request waits, runs or is being pulled."""
        return not any(self.queues())

    def queues(self) -> tuple[int, int, int]:
        """How many requests wait, run, and are being pulled."""
        return self.imports.num_waiting, self.scheduler.num_running, self.imports.num_importing

    def start(self, command: work_pb2.DecodeStart) -> None:
        """Queues a request to be pulled, or begins to pull one whose prompt is still computed."""
        self.imports.submit(
            Import(
                answers_from_proto(command),
                Source(command.source_address, command.source_epoch),
                num_tokens=len(command.assignment.token_ids),
                early=not command.next_token_ids,
            )
        )

    def first_tokens(self, command: work_pb2.FirstTokens) -> None:
        """The prompt of an early request is complete."""
        tokens = zip(command.indexes, command.next_token_ids, strict=False)
        self.imports.first_tokens(command.ticket, dict(tokens))

    def cancel(self, ticket: str, indexes: Collection[int]) -> None:
        """Drops answers wherever they stand."""
        for index in indexes:
            self.scheduler.finish((ticket, index))
        self.imports.cancel(ticket, indexes)

    def renew(self, tickets: Iterable[str]) -> None:
        """Nothing is leased here."""

    async def run(self) -> None:
        """Keeps the pulls' connections until cancelled, then ends every pull."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.imports.close()
            await self._puller.close()

    def _run(self, request: Request) -> None:
        self.scheduler.add(request)
        self._node.loop.wake()


class DecodeService(work_pb2_grpc.DecodeNodeServicer):
    """The routers' work streams."""

    def __init__(self, work: WorkStreams) -> None:
        self._work = work

    async def Work(  # type: ignore[override]
        self, commands: AsyncIterator[work_pb2.DecodeCommand], context: Any
    ) -> None:
        """One router's stream."""
        await self._work.serve(commands, context)
