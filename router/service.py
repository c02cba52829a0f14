"""What the router serves to clients and operators."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from router.admission import Admission
from router.answer import Answer
from router.course import Course
from router.dispatch import Dispatcher
from router.members import Members
from router.tracker import TrackedRequest, Tracker
from splitserve.core.config import CLIENT_STALL_TIMEOUT_S, RouterConfig
from splitserve.core.errors import (
    DeadlineExceededError,
    SplitserveError,
    UnavailableError,
)
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.request import FinishReason
from splitserve.rpc.convert import lifetime_to_proto
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServicer):
    """The door of the cluster.

    Args:
        config: The router's limits.
        address: Where it serves, for the status.
        members: Its nodes.
        tracker: Its requests.
    """

    def __init__(
        self, config: RouterConfig, address: str, members: Members, tracker: Tracker
    ) -> None:
        self._config = config
        self._address = address
        self._members = members
        self._tracker = tracker
        self._admission = Admission(members)
        self._dispatcher = Dispatcher(members)
        self._closed = False

    def refuse(self) -> None:
        """Takes no new requests; those that run go on."""
        self._closed = True

    async def Generate(  # type: ignore[override]
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams the answers. Whichever way this ends, nodes hold nothing of it afterwards."""
        if self._closed:
            raise UnavailableError("this router is stopping; ask another, or again")
        self._members.check_ready()
        with self._tracker.track(self._admission.request_id(request)) as tracked:
            async with _client_limits(tracked, context):
                prompt = await self._admission.read(request)
                tracked.prompt_tokens = len(prompt.token_ids)
                tracked.answers_left = prompt.sampling.n
                tokenizer = self._members.model.tokenizer
                answers = [
                    Answer(tokenizer, prompt.token_ids, prompt.sampling.stop, index)
                    for index in range(prompt.sampling.n)
                ]
                course = Course(tracked, prompt, answers, self._dispatcher, self._config)
                with course.running():
                    await _relay(tracked, answers, context)

    async def Abort(
        self, request: router_pb2.AbortRequest, context: Context
    ) -> router_pb2.AbortResponse:
        """Ends a running request."""
        self._tracker.get(request.request_id).finish(FinishReason.ABORTED)
        return router_pb2.AbortResponse()

    async def GetLifetime(
        self, request: router_pb2.GetLifetimeRequest, context: Context
    ) -> common_pb2.Lifetime:
        """A request's life so far."""
        return lifetime_to_proto(self._tracker.lifetime(request.request_id))

    async def GetStatus(
        self, request: router_pb2.GetStatusRequest, context: Context
    ) -> router_pb2.RouterStatus:
        """The router and all its nodes, asked at once."""
        nodes = await asyncio.gather(*(session.status() for session in self._members.sessions))
        return router_pb2.RouterStatus(
            address=self._address,
            model=self._members.model.name,
            queued=self._tracker.num_queued,
            running=self._tracker.num_running,
            finished=self._tracker.totals,
            nodes=nodes,
        )


async def _relay(tracked: TrackedRequest, answers: list[Answer], context: Context) -> None:
    """Hands the client all there is, a message per answer; a slow reader finds it in one."""
    while True:
        await tracked.changed()
        # Once round the loop: news that are here already go into the same message.
        await asyncio.sleep(0)
        outcome = tracked.outcome
        if isinstance(outcome, SplitserveError):
            raise outcome
        if outcome is not None:
            for answer in answers:
                answer.end(outcome)
        deltas = [delta for answer in answers if (delta := answer.take()) is not None]
        for delta in deltas:
            delta.request_id = tracked.request_id
            if delta.token_ids:
                tracked.count_tokens(len(delta.token_ids))
        if outcome is not None:
            # The answer that ended last has not been told of until now.
            _complete(deltas[-1], tracked)
        for delta in deltas:
            await context.write(delta)
        if outcome is not None:
            return


def _complete(last: router_pb2.GenerateResponse, tracked: TrackedRequest) -> None:
    tracked.note(LifetimeEventKind.FINISHED)
    last.usage.prompt_tokens = tracked.prompt_tokens
    last.usage.completion_tokens = tracked.completion_tokens
    last.usage.cached_tokens = tracked.cached_tokens
    last.lifetime.CopyFrom(lifetime_to_proto(tracked.lifetime))


@asynccontextmanager
async def _client_limits(tracked: TrackedRequest, context: Context) -> AsyncIterator[None]:
    """Within, the client is there, reads, and its deadline has not passed."""
    try:
        async with asyncio.timeout(context.time_remaining()) as limit:
            # A reader too slow for what is complete may be stuck in any message, not the last.
            with tracked.when_finished(lambda: _hurry(limit)):
                yield
    except TimeoutError:
        raise DeadlineExceededError(
            "deadline: it passed before the answer was complete and read"
        ) from None
    except asyncio.CancelledError:
        # gRPC cancels for both; only its clock tells which.
        if context.time_remaining() == 0:
            tracked.finish(DeadlineExceededError("deadline: it passed"))
        raise


def _hurry(limit: asyncio.Timeout) -> None:
    then = asyncio.get_running_loop().time() + CLIENT_STALL_TIMEOUT_S
    limit.reschedule(then if (when := limit.when()) is None else min(when, then))
