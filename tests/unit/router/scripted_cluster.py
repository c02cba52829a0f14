"""A router in this process, scripted nodes around it, and a client."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from scripted_node import Behaviour, ScriptedNode, decode, prefill

from router.daemon import Router
from router.model import ServedModel
from splitserve.core.node import NodeKind
from splitserve.v1 import common_pb2, router_pb2


@dataclass
class Reply:
    """All that a client got."""

    messages: list[router_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages for token_id in message.token_ids]

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def last(self) -> router_pb2.GenerateResponse:
        return self.messages[-1]

    @property
    def events(self) -> list[str]:
        return [kind_name(event.kind) for event in self.last.lifetime.events]


def kind_name(kind: int) -> str:
    name = common_pb2.LifetimeEventKind.Name(kind)  # type: ignore[arg-type]
    return name.removeprefix("LIFETIME_EVENT_KIND_")


class Cluster:
    """A router and its scripted nodes."""

    def __init__(self, router: Router, stack: AsyncExitStack, stub: Any) -> None:
        self.router = router
        self.stub = stub
        self._stack = stack

    async def node(self, kind: NodeKind, behave: Behaviour, **info: Any) -> ScriptedNode:
        node = ScriptedNode(kind, behave, **info)
        self._stack.push_async_callback(node.stop)
        return await node.start(self.router.address)

    async def prefill(self, behave: Behaviour = prefill, **info: Any) -> ScriptedNode:
        return await self.node(NodeKind.PREFILL, behave, **info)

    async def decode(self, behave: Behaviour = decode, **info: Any) -> ScriptedNode:
        return await self.node(NodeKind.DECODE, behave, **info)

    def call(
        self,
        token_ids: Sequence[int] = (1, 2, 3),
        *,
        request_id: str = "",
        timeout: float | None = 20.0,
        **sampling: Any,
    ) -> Any:
        request = router_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=router_pb2.TokenIds(ids=token_ids),
            sampling=common_pb2.SamplingParams(**sampling),
        )
        return self.stub.Generate(request, timeout=timeout)

    async def ask(self, token_ids: Sequence[int] = (1, 2, 3), **arguments: Any) -> Reply:
        return await read(self.call(token_ids, **arguments))

    def roomy_model(self, max_model_len: int) -> ServedModel:
        return replace(self.router.members.model, max_model_len=max_model_len)

    @property
    def tickets(self) -> int:
        """Attempts that any session still knows."""
        return sum(len(session.attempts) for session in self.router.members.sessions)


async def read(call: Any) -> Reply:
    """All that is still to come."""
    reply = Reply()
    while (message := await call.read()) is not grpc.aio.EOF:
        reply.messages.append(message)
    return reply
