"""One work stream to one node: commands out, news in, and what the node holds for this router."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from router.attempts import Attempt, Attempts, Holder
from router.clock import NodeClock
from router.prefixes import GivenPrefixes, PromptKeys
from splitserve.core.config import (
    CLOCK_PINGS,
    MAX_PENDING_COMMANDS,
    MAX_UNANSWERED_PINGS,
    NODE_STATUS_TIMEOUT_S,
    PING_INTERVAL_S,
    RPC_TIMEOUT_S,
)
from splitserve.core.errors import UnavailableError
from splitserve.core.lifetime import LifetimeEvent, LifetimeEventKind
from splitserve.core.node import NodeInfo, NodeKind
from splitserve.rpc.channel import open_channel
from splitserve.rpc.convert import event_from_proto, node_info_to_proto
from splitserve.rpc.errors import error_from_rpc
from splitserve.v1 import common_pb2, node_pb2, node_pb2_grpc, work_pb2, work_pb2_grpc


class NodeSession:
    """A node as its router sees it.

    Args:
        info: What the node is, as it joined.
        router_id: The router's random id.
        on_room: Called whenever the node may have room for more.

    Attributes:
        info: What the node is.
        attempts: What it holds for this router.
        prefixes: What it most likely has the KV of.
        leaving: Set once it takes no new work.
        lost: Why the stream is no more; empty while it stands.
    """

    def __init__(self, info: NodeInfo, router_id: str, on_room: Callable[[], None]) -> None:
        self.info = info
        self.leaving = False
        self.lost = ""
        self.attempts = Attempts(on_room)
        self.prefixes = GivenPrefixes(info)
        self._clock = NodeClock()
        self._silent_beats = 0
        self._command: Any = (
            work_pb2.PrefillCommand if info.kind is NodeKind.PREFILL else work_pb2.DecodeCommand
        )
        hello = work_pb2.Hello(router_id=router_id, node_epoch=info.epoch)
        # None stands for a ping: it is made when its turn comes, so that it does not measure
        # this queue.
        self._pending: deque[Any] = deque([self._command(hello=hello)])
        self._has_pending = asyncio.Event()
        self._channel = open_channel(info.address)
        self._call: Any = None

    @property
    def usable(self) -> bool:
        """Whether it can be given work."""
        return not self.leaving and not self.lost

    def cost(self, prompt: PromptKeys) -> tuple[int, int, int]:
        """What a prompt would have to wait for on this node, and do there; smaller is better.

        On a prefill node that is prompt tokens to compute, its own included, but for those whose
        KV is there; then those leased. On a decode node it is answers, then tokens to pull.
        """
        load = self.attempts.load
        missing = len(prompt.token_ids) - self.prefixes.match(prompt)
        if self.info.kind is NodeKind.DECODE:
            return load.answers, missing, load.tokens
        return load.tokens + missing, load.leased_tokens, load.answers

    def start(self, start: Any, holder: Holder, prompt: PromptKeys) -> Attempt:
        """Gives the node a `PrefillStart` or `DecodeStart`."""
        assignment = start.assignment
        indexes = set(assignment.indexes)
        tokens = len(prompt.token_ids) - self.prefixes.match(prompt)
        self.prefixes.add(prompt)
        attempt = Attempt(assignment.ticket, tokens, self, holder, indexes, indexes.copy())
        decoding = self.info.kind is NodeKind.DECODE
        attempt.early = decoding and not start.next_token_ids
        self.attempts.add(attempt)
        self._send(self._command(start=start))
        return attempt

    def first_tokens(self, attempt: Attempt, tokens: Mapping[int, int]) -> None:
        """Tells a decode node that the prompt it pulls early is complete.

        Args:
            attempt: The node's.
            tokens: The next token of each answer that goes on.
        """
        attempt.early = False
        attempt.open, attempt.untold = set(tokens), set(tokens)
        first_tokens = work_pb2.FirstTokens(
            ticket=attempt.ticket, indexes=tokens.keys(), next_token_ids=tokens.values()
        )
        self._send(self._command(first_tokens=first_tokens))

    def cancel(self, attempt: Attempt) -> None:
        """Tells the node to drop an attempt, unless it holds nothing of it any more."""
        if self.drop(attempt):
            self._send(self._command(cancel=work_pb2.Cancel(ticket=attempt.ticket)))

    def cancel_answer(self, attempt: Attempt, index: int) -> None:
        """Tells the node to drop one of several answers."""
        cancel = work_pb2.Cancel(ticket=attempt.ticket, indexes=[index])
        self._send(self._command(cancel=cancel))

    def drop(self, attempt: Attempt) -> bool:
        """Forgets an attempt of which the node holds nothing; says whether it was known."""
        if not self.attempts.drop(attempt):
            return False
        if self.leaving:
            # Closing lets the Cancel that may follow this go first.
            asyncio.get_running_loop().call_soon(self._close_if_idle)
        return True

    def on_our_clock(self, event: common_pb2.LifetimeEvent) -> LifetimeEvent:
        """A node's event, on the router's clock and with the node's name."""
        ours = event_from_proto(event)
        time_ns = self._clock.to_ours(ours.time_ns)
        return LifetimeEvent(ours.kind, time_ns, self.info.name, ours.transfer)

    def retire(self) -> None:
        """No new work; the stream ends once the node holds nothing for this router."""
        self.leaving = True
        self._close_if_idle()

    async def open(self) -> None:
        """Dials back and makes sure that it is the node that joined.

        Raises:
            SplitserveError: It is not there, or another one is.
        """
        stub: Any = (
            work_pb2_grpc.PrefillNodeStub(self._channel)
            if self.info.kind is NodeKind.PREFILL
            else work_pb2_grpc.DecodeNodeStub(self._channel)
        )
        self._call = stub.Work(self._commands())
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await self._handshake()
        except TimeoutError:
            raise UnavailableError(
                f"address: {self.info.address} did not answer within {RPC_TIMEOUT_S:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def _handshake(self) -> None:
        welcome = await self._call.read()
        if welcome is grpc.aio.EOF or welcome.welcome.node.epoch != self.info.epoch:
            raise UnavailableError(f"address: {self.info.address} is not the node that joined")
        for _ in range(CLOCK_PINGS):
            self._send(None)
            update = await self._call.read()
            if update is grpc.aio.EOF:
                raise UnavailableError(f"address: {self.info.address} ended the work stream")
            self._clock.pong(update.pong)

    async def run(self) -> None:
        """Hands out news until the stream ends, then tells every holder at once."""
        beat = asyncio.create_task(self._beat())
        reason = "the node ended the work stream"
        try:
            while (update := await self._call.read()) is not grpc.aio.EOF:
                # Any news are a sign of life: a pong may have to wait behind many of them.
                self._silent_beats = 0
                if update.HasField("step"):
                    self._deliver(update.step.progress)
                elif update.HasField("pong"):
                    self._clock.pong(update.pong)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        except asyncio.CancelledError:
            # Ours means that the call was ended here; anybody else's must go on.
            if not self._call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
        finally:
            beat.cancel()
            self._call.cancel()
            self._lose(reason)
            await self._channel.close()

    async def status(self) -> node_pb2.NodeStatus:
        """What the node says of itself; if it does not answer in time, that it does not serve."""
        stub: Any = node_pb2_grpc.NodeControlStub(self._channel)
        try:
            status: node_pb2.NodeStatus = await stub.GetNodeStatus(
                node_pb2.GetNodeStatusRequest(), timeout=NODE_STATUS_TIMEOUT_S
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return node_pb2.NodeStatus(info=node_info_to_proto(self.info), serving=False)
        return status

    def end(self, reason: str) -> None:
        """Ends the stream, whatever the node holds."""
        self.lost = self.lost or reason
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Ends a session that never ran."""
        self.end("closed")
        await self._channel.close()

    def _deliver(self, news: Any) -> None:
        attempts = self.attempts.by_ticket
        for progress in news:
            # Late news of a ticket that has been cancelled meanwhile concerns nobody.
            if attempt := attempts.get(progress.ticket):
                attempt.holder.on_progress(attempt, progress)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        for attempt in self.attempts.take_all():
            attempt.holder.on_lost(attempt, self.lost)

    def _close_if_idle(self) -> None:
        if self.leaving and not self.attempts and not self._pending:
            self.end("the node left")

    def _send(self, command: Any) -> None:
        if self.lost:
            return
        if len(self._pending) >= MAX_PENDING_COMMANDS:
            self.end(f"the node is {MAX_PENDING_COMMANDS} commands behind")
            return
        self._pending.append(command)
        self._has_pending.set()

    async def _commands(self) -> AsyncIterator[Any]:
        while True:
            while self._pending:
                command = self._pending.popleft()
                yield self._command(ping=self._clock.ping()) if command is None else command
            self._close_if_idle()
            self._has_pending.clear()
            await self._has_pending.wait()

    async def _beat(self) -> None:
        """Measures the clock, renews leases, and finds a node that is connected but stands still.

        Pings are counted and not timed: if this process was stopped for a while, the answers are
        there and have only not been read.
        """
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self._silent_beats >= MAX_UNANSWERED_PINGS:
                self.end(f"the node left {self._silent_beats} pings unanswered")
                return
            self._silent_beats += 1
            self._send(None)
            if self.info.kind is NodeKind.PREFILL and self.attempts:
                renew = work_pb2.RenewLeases(tickets=self.attempts.by_ticket)
                self._send(self._command(renew=renew))


def migrated(progress: work_pb2.Progress) -> bool:
    """Whether a decode node's news say that it holds the KV itself."""
    return bool(progress.token_ids) or any(event.kind in _HOLDS_KV for event in progress.events)


_HOLDS_KV = (LifetimeEventKind.MIGRATION_END.value, LifetimeEventKind.DECODE_BEGIN.value)
