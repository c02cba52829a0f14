"""Who is there: nodes join by a call that lives as long as their membership."""

import asyncio
import logging
from typing import Any

import grpc

from router.model import ServedModel
from router.session import NodeSession
from splitserve.core.config import check_address
from splitserve.core.errors import FailedPreconditionError, UnavailableError, invalid
from splitserve.core.node import NodeInfo, NodeKind
from splitserve.core.ticket import new_epoch
from splitserve.rpc.convert import node_info_from_proto
from splitserve.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)


class Members:
    """Every node whose work stream stands.

    Args:
        model: What nodes must serve to join.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.router_id = new_epoch()
        self._sessions: dict[NodeSession, asyncio.Task[None]] = {}
        self._room = {kind: asyncio.Event() for kind in NodeKind}
        self._changed = asyncio.Event()

    @property
    def sessions(self) -> list[NodeSession]:
        """Every node, those that leave included."""
        return list(self._sessions)

    @property
    def missing(self) -> list[NodeKind]:
        """Kinds of node without which nothing can be served."""
        return [kind for kind in NodeKind if not self.usable(kind)]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer that the model and every node take."""
        limits = [session.info.max_model_len for session in self._sessions if session.usable]
        return min([self.model.max_model_len, *limits])

    def usable(self, kind: NodeKind) -> list[NodeSession]:
        """Nodes that can be given work."""
        return [s for s in self._sessions if s.info.kind is kind and s.usable]

    def check_ready(self) -> None:
        """Raises `UnavailableError`, naming it, if a kind of node is missing."""
        if missing := self.missing:
            raise UnavailableError(f"no {' and no '.join(k.label for k in missing)} node is joined")

    async def changed(self) -> None:
        """Waits until somebody joins or leaves."""
        await self._changed.wait()

    async def room(self, kind: NodeKind) -> None:
        """Waits until a node of that kind may have room, has joined or has left."""
        await self._room[kind].wait()

    async def join(self, info: NodeInfo) -> tuple[NodeSession, str]:
        """Dials back and makes a node usable.

        Returns:
            Its session, and how KV will move to or from it.

        Raises:
            FailedPreconditionError: It cannot serve here; the message says why.
            UnavailableError: It cannot be reached.
        """
        self._check(info)
        session = NodeSession(info, self.router_id, lambda: self._notify_room(info.kind))
        try:
            await session.open()
            # Others may have joined while we dialled.
            transport = self._check(info)
        except BaseException:
            await session.close()
            raise
        for other in self.sessions:
            if other.info.epoch == info.epoch:
                other.retire()
        self._sessions[session] = asyncio.create_task(self._run(session))
        log.info("node joined", extra={"node": info.name, "transport": transport})
        self._notify(info.kind)
        return session, transport

    def leave(self, session: NodeSession) -> None:
        """A node takes no new work; what it runs goes on."""
        if session.usable:
            log.info("node leaves", extra={"node": session.info.name})
        session.retire()
        self._notify(session.info.kind)

    async def close(self) -> None:
        """Ends every work stream."""
        for session in self._sessions:
            session.end("the router stops")
        await asyncio.gather(*self._sessions.values(), return_exceptions=True)

    async def _run(self, session: NodeSession) -> None:
        try:
            await session.run()
        finally:
            del self._sessions[session]
            log.info("node gone", extra={"node": session.info.name, "reason": session.lost})
            self._notify(session.info.kind)

    def _check(self, info: NodeInfo) -> str:
        others = [session.info for session in self._sessions if not session.lost]
        return check_compatible(info, self.model, others)

    def _notify(self, kind: NodeKind) -> None:
        # Whoever waits holds the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
        self._notify_room(kind)

    def _notify_room(self, kind: NodeKind) -> None:
        self._room[kind].set()
        self._room[kind] = asyncio.Event()


class MembershipService(node_pb2_grpc.MembershipServicer):
    """Nodes announce themselves here."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def Join(  # type: ignore[override]
        self, request: node_pb2.NodeInfo, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """A member until the call ends, or the work stream does: then the node joins again."""
        if request.kind == node_pb2.NODE_KIND_UNSPECIFIED:
            raise invalid("kind", "NODE_KIND_UNSPECIFIED", "prefill or decode")
        check_address("address", request.address, dialable=True)
        session, transport = await self._members.join(node_info_from_proto(request))
        try:
            joined = node_pb2.Joined(router_id=self._members.router_id, transport=transport)
            await context.write(node_pb2.JoinEvent(joined=joined))
            while session.usable:
                await self._members.changed()
        finally:
            self._members.leave(session)
        raise UnavailableError(f"work stream: {session.lost or 'replaced by another'}")


def check_compatible(info: NodeInfo, model: ServedModel, others: list[NodeInfo]) -> str:
    """Whether a node can serve beside the others; returns the transport it will use.

    Raises:
        FailedPreconditionError: It cannot. The message names the field, its value and ours.
    """
    architecture, _, _ = info.model_fingerprint.partition("-")
    _same("model_fingerprint", architecture, model.architecture, "this router serves a model of")
    _same("vocab_size", info.vocab_size, model.vocab_size, "this router's model has")
    for other in others:
        has = f"{other.name} has"
        _same("model_fingerprint", info.model_fingerprint, other.model_fingerprint, has)
        _same("kv_dtype", info.kv_dtype, other.kv_dtype, has)
    peers = [other for other in others if other.kind is not info.kind]
    for peer in peers:
        if not set(info.transports) & set(peer.transports):
            raise FailedPreconditionError(
                f"transports: {list(info.transports)} of this node and {list(peer.transports)} of "
                f"{peer.name} have none in common"
            )
    for transport in info.transports:
        if all(transport in peer.transports for peer in peers):
            return transport
    if not info.transports:
        raise FailedPreconditionError("transports: none named; a node needs at least one")
    return info.transports[0]


def _same(field: str, theirs: object, ours: object, who: str) -> None:
    if theirs != ours:
        raise FailedPreconditionError(f"{field}: {theirs!r} of this node differs: {who} {ours!r}")
