"""A node's end of the work streams: commands in, one message of news per step and router out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any, Protocol

import grpc

from splitserve.core.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.core.node import NodeInfo
from splitserve.core.request import Progress
from splitserve.rpc.convert import node_info_to_proto, progress_to_proto
from splitserve.v1 import work_pb2

log = logging.getLogger(__name__)


class WorkHandler(Protocol):
    """What a kind of node does with a router's commands."""

    def start(self, command: Any) -> None:
        """Takes a `PrefillStart` or `DecodeStart`.

        Raises:
            SplitserveError: The node does not take it, and holds nothing of it.
        """

    def cancel(self, ticket: str, indexes: Collection[int]) -> None:
        """Drops these answers of a ticket, at least one, and what only they need.

        What the node holds no more is ignored.
        """

    def renew(self, tickets: Iterable[str]) -> None:
        """Keeps leases alive."""

    def first_tokens(self, command: Any) -> None:
        """Completes an early `DecodeStart`."""


class _Stream:
    """One router's stream: what it has started here, and what it is yet to be told."""

    def __init__(self) -> None:
        # Each ticket's answers that are not ended.
        self.open: dict[str, set[int]] = {}
        self._news: list[Progress] = []
        self._pongs: list[work_pb2.Pong] = []
        self._changed = asyncio.Event()
        self._ended = False

    def tell(self, progress: Progress) -> None:
        self._news.append(progress)
        self._changed.set()

    def pong(self, pong: work_pb2.Pong) -> None:
        self._pongs.append(pong)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def updates(self) -> AsyncIterator[work_pb2.WorkUpdate]:
        """All that is to be told, as few messages as the reader's speed allows."""
        while not self._ended:
            await self._changed.wait()
            self._changed.clear()
            pongs, self._pongs = self._pongs, []
            for pong in pongs:
                yield work_pb2.WorkUpdate(pong=pong)
            news, self._news = self._news, []
            if news:
                step = work_pb2.Step(progress=map(progress_to_proto, news))
                yield work_pb2.WorkUpdate(step=step)


class WorkStreams:
    """Every router's work stream on this node.

    Args:
        info: What the node is.
        handler: What it does with commands.
    """

    def __init__(self, info: NodeInfo, handler: WorkHandler) -> None:
        self._info = info
        self._handler = handler
        self._owners: dict[str, _Stream] = {}
        self._num_open = 0

    @property
    def idle(self) -> bool:
        """Whether no stream is open: no router can send anything that it counts on."""
        return self._num_open == 0

    def publish(self, news: Iterable[Progress]) -> None:
        """Tells each request's news to its router; a router that left hears nothing."""
        for progress in news:
            stream = self._owners.get(progress.ticket)
            if stream is None:
                continue
            stream.tell(progress)
            if progress.error is not None:
                self.forget(progress.ticket)
            elif progress.finish_reason is not None:
                self._end(progress.ticket, {progress.index})

    def forget(self, ticket: str) -> None:
        """The node holds nothing for the ticket any more."""
        stream = self._owners.pop(ticket, None)
        if stream is not None:
            del stream.open[ticket]

    async def serve(
        self, commands: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One stream, from Hello to its end; then all it started here is cancelled."""
        router_id = await self._greet(commands)
        await context.write(
            work_pb2.WorkUpdate(welcome=work_pb2.Welcome(node=node_info_to_proto(self._info)))
        )
        log.info("work stream opened", extra={"router_id": router_id})
        stream = _Stream()
        reader = asyncio.create_task(self._read(stream, commands))
        self._num_open += 1
        try:
            async for update in stream.updates():
                await context.write(update)
            await reader
        finally:
            self._num_open -= 1
            reader.cancel()
            log.info(
                "work stream ended", extra={"router_id": router_id, "dropped": len(stream.open)}
            )
            for ticket, indexes in list(stream.open.items()):
                self._cancel(ticket, set(indexes))

    async def _greet(self, commands: AsyncIterator[Any]) -> str:
        command = await anext(commands, None)
        if command is None or command.WhichOneof("command") != "hello":
            raise InvalidArgumentError("command: the first one must be hello")
        if command.hello.node_epoch != self._info.epoch:
            raise FailedPreconditionError("node_epoch: this node has been started anew since")
        router_id: str = command.hello.router_id
        return router_id

    async def _read(self, stream: _Stream, commands: AsyncIterator[Any]) -> None:
        try:
            async for command in commands:
                kind = command.WhichOneof("command")
                if kind == "start":
                    self._start(stream, command.start)
                elif kind == "cancel":
                    ticket = command.cancel.ticket
                    held = stream.open.get(ticket, set())
                    if indexes := held & set(command.cancel.indexes or held):
                        self._cancel(ticket, indexes)
                elif kind == "ping":
                    stream.pong(
                        work_pb2.Pong(sequence=command.ping.sequence, time_ns=time.time_ns())
                    )
                elif kind == "first_tokens":
                    self._first_tokens(stream, command.first_tokens)
                elif kind == "renew":
                    self._handler.renew(command.renew.tickets)
                else:
                    raise InvalidArgumentError(f"command: {kind!r} is not allowed here")
        finally:
            stream.end()

    def _start(self, stream: _Stream, start: Any) -> None:
        ticket = start.assignment.ticket
        if ticket in self._owners:
            raise InvalidArgumentError("ticket: given to two requests")
        self._owners[ticket] = stream
        stream.open[ticket] = set(start.assignment.indexes or (0,))
        try:
            self._handler.start(start)
        except SplitserveError as error:
            self.publish([Progress(ticket, error=error)])

    def _first_tokens(self, stream: _Stream, command: Any) -> None:
        if held := stream.open.get(command.ticket):
            held.intersection_update(command.indexes)
            self._handler.first_tokens(command)

    def _cancel(self, ticket: str, indexes: set[int]) -> None:
        self._end(ticket, indexes)
        self._handler.cancel(ticket, indexes)

    def _end(self, ticket: str, indexes: set[int]) -> None:
        stream = self._owners[ticket]
        stream.open[ticket] -= indexes
        if not stream.open[ticket]:
            self.forget(ticket)
