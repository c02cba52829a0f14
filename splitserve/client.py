"""The Python client of a router: `AsyncClient` for event loops, `Client` for everybody else."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc

from splitserve.core.config import RPC_TIMEOUT_S
from splitserve.core.errors import CancelledError
from splitserve.core.lifetime import Lifetime
from splitserve.core.sampling import SamplingParams
from splitserve.messages import (
    Chat,
    ChatTurn,
    ClusterStatus,
    Completion,
    Delta,
    Usage,
    check_single,
    checked_text,
    checked_timeout,
    completions_of,
    delta_from_proto,
    generate_request,
    status_from_proto,
    unfinished,
)
from splitserve.rpc.channel import open_channel, open_sync_channel
from splitserve.rpc.convert import lifetime_from_proto
from splitserve.rpc.errors import error_from_rpc
from splitserve.v1 import router_pb2, router_pb2_grpc

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Chat",
    "ChatTurn",
    "Client",
    "ClusterStatus",
    "Completion",
    "Delta",
    "Generation",
    "Usage",
]


class AsyncGeneration(AsyncIterator[Delta]):
    """A request's answers under way; ``async for delta in generation`` reads them.

    The request ends with this object: when an ``async with`` block over it is left, when
    `cancel` is called, when a read is cancelled, or when nothing refers to it any more. So
    ``break`` out of ``async for delta in client.generate(...)`` ends the request at once. A
    generation that a variable still names lives on after a ``break``: use ``async with``.
    """

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[Any, router_pb2.GenerateResponse]",
        sampling: SamplingParams | None = None,
    ) -> None:
        self._call = call
        self._sampling = sampling
        self._responses = aiter(call)
        self._finished = False

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            SplitserveError: The request failed, or `cancel` has ended it.
        """
        try:
            delta = delta_from_proto(await anext(self._responses))
        except StopAsyncIteration:
            if not self._finished:
                raise unfinished() from None
            raise
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # `cancel` was called on the request; the task that reads it is not cancelled.
                raise CancelledError("the client cancelled the request") from None
            self.cancel()
            raise
        self._finished = delta.usage is not None
        return delta

    async def completion(self) -> Completion:
        """Reads to the end and puts the answer together.

        Raises:
            InvalidArgumentError: Several answers were asked for; see `completions`.
            SplitserveError: The request failed.
        """
        check_single(self._sampling)
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Reads to the end and puts all ``n`` answers together, in the order of their index.

        Raises:
            SplitserveError: The request failed.
        """
        async with self:
            return completions_of([delta async for delta in self])

    def cancel(self) -> None:
        """Ends the request, wherever it is; harmless on one that has ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # gRPC itself keeps a dropped call running. Where the loop is closed, the call is over.
        with suppress(RuntimeError):
            self._call.cancel()


class AsyncClient:
    """A client for an event loop; ``async with AsyncClient(address) as client``.

    Args:
        address: The router's ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel: grpc.aio.Channel | None = None

    @property
    def _stub(self) -> "router_pb2_grpc.RouterAsyncStub":
        # A channel belongs to the loop it is opened in, so it waits for the first call.
        if self._channel is None:
            self._channel = open_channel(self.address)
        return router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        chat: Chat | None = None,
        sampling: SamplingParams | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncGeneration:
        """Asks for an answer to exactly one of prompt, token ids and chat.

        Args:
            prompt: A text, tokenised by the router.
            token_ids: Tokens, used as they are.
            chat: Turns, oldest first, each with a role and a content.
            sampling: How to choose tokens; None takes the defaults.
            request_id: Unique among running requests; empty lets the router make one.
            timeout: Seconds after which the request ends with `DeadlineExceededError`.

        Raises:
            InvalidArgumentError: The request cannot be sent as it is.
        """
        request = generate_request(prompt, token_ids, chat, sampling, request_id)
        call = self._stub.Generate(request, timeout=checked_timeout(timeout))
        return AsyncGeneration(call, sampling)

    async def abort(self, request_id: str, *, timeout: float = RPC_TIMEOUT_S) -> None:
        """Ends a running request; its stream finishes with ABORTED.

        Raises:
            NotFoundError: No such request runs.
        """
        request = router_pb2.AbortRequest(request_id=checked_text("request_id", request_id))
        await self._ask(self._stub.Abort, request, timeout)

    async def lifetime(self, request_id: str, *, timeout: float = RPC_TIMEOUT_S) -> Lifetime:
        """The life of a running or recently finished request.

        Raises:
            NotFoundError: The router does not know the request.
        """
        request = router_pb2.GetLifetimeRequest(request_id=checked_text("request_id", request_id))
        return lifetime_from_proto(await self._ask(self._stub.GetLifetime, request, timeout))

    async def status(self, *, timeout: float = RPC_TIMEOUT_S) -> ClusterStatus:
        """The router, its nodes, their blocks and queues."""
        request = router_pb2.GetStatusRequest()
        return status_from_proto(await self._ask(self._stub.GetStatus, request, timeout))

    async def close(self) -> None:
        """Ends what runs and closes the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @staticmethod
    async def _ask(method: Any, request: Any, timeout: float) -> Any:
        try:
            return await method(request, timeout=checked_timeout(timeout))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


class Generation(Iterator[Delta]):
    """A request's answers under way; ``for delta in generation`` reads them.

    Like `AsyncGeneration` it ends the request when left: by ``with``, by `cancel` (from any
    thread), by an exception in a read such as Ctrl-C, or when nothing refers to it any more.
    """

    def __init__(
        self,
        call: "grpc._CallIterator[router_pb2.GenerateResponse]",
        sampling: SamplingParams | None = None,
    ) -> None:
        self._call = call
        self._sampling = sampling
        self._finished = False

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            SplitserveError: The request failed, or `cancel` has ended it.
        """
        try:
            delta = delta_from_proto(next(self._call))
        except StopIteration:
            if not self._finished:
                raise unfinished() from None
            raise
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        except BaseException:
            self.cancel()
            raise
        self._finished = delta.usage is not None
        return delta

    def completion(self) -> Completion:
        """Reads to the end and puts the answer together.

        Raises:
            InvalidArgumentError: Several answers were asked for; see `completions`.
            SplitserveError: The request failed.
        """
        check_single(self._sampling)
        return self.completions()[0]

    def completions(self) -> list[Completion]:
        """Reads to the end and puts all ``n`` answers together, in the order of their index.

        Raises:
            SplitserveError: The request failed.
        """
        with self:
            return completions_of(self)

    def cancel(self) -> None:
        """Ends the request, wherever it is; harmless on one that has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._call.cancel()


class Client:
    """A client for callers without an event loop; ``with Client(address) as client``.

    Args:
        address: The router's ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_sync_channel(address)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        chat: Chat | None = None,
        sampling: SamplingParams | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """Asks for an answer; the arguments are those of `AsyncClient.generate`.

        Raises:
            InvalidArgumentError: The request cannot be sent as it is.
        """
        request = generate_request(prompt, token_ids, chat, sampling, request_id)
        call = self._stub.Generate(request, timeout=checked_timeout(timeout))
        return Generation(call, sampling)

    def abort(self, request_id: str, *, timeout: float = RPC_TIMEOUT_S) -> None:
        """Ends a running request; its stream finishes with ABORTED.

        Raises:
            NotFoundError: No such request runs.
        """
        request = router_pb2.AbortRequest(request_id=checked_text("request_id", request_id))
        self._ask(self._stub.Abort, request, timeout)

    def lifetime(self, request_id: str, *, timeout: float = RPC_TIMEOUT_S) -> Lifetime:
        """The life of a running or recently finished request.

        Raises:
            NotFoundError: The router does not know the request.
        """
        request = router_pb2.GetLifetimeRequest(request_id=checked_text("request_id", request_id))
        return lifetime_from_proto(self._ask(self._stub.GetLifetime, request, timeout))

    def status(self, *, timeout: float = RPC_TIMEOUT_S) -> ClusterStatus:
        """The router, its nodes, their blocks and queues."""
        request = router_pb2.GetStatusRequest()
        return status_from_proto(self._ask(self._stub.GetStatus, request, timeout))

    def close(self) -> None:
        """Ends what runs and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _ask(method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=checked_timeout(timeout))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
