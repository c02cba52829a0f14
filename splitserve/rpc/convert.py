"""Proto to vocabulary and back; the only place that knows both."""

from dataclasses import replace

from splitserve.core.errors import error_from_code, invalid
from splitserve.core.lifetime import KvTransfer, Lifetime, LifetimeEvent, LifetimeEventKind
from splitserve.core.node import NodeInfo, NodeKind, NodeStatus, RankInfo
from splitserve.core.request import FinishReason, Progress, Request, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.kv.handle import KvHandle, RankMemory
from splitserve.kv.layout import KVLayout
from splitserve.v1 import common_pb2, kv_pb2, node_pb2, work_pb2

_OPTIONAL_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "repetition_penalty",
    "logprobs",
    "n",
)
_PLAIN_SAMPLING = ("top_k", "min_p", "ignore_eos", "presence_penalty", "frequency_penalty")


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field that is set."""
    message = common_pb2.SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids)
    for name in _OPTIONAL_SAMPLING + _PLAIN_SAMPLING:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take their defaults.

    Raises:
        InvalidArgumentError: A field is outside what is allowed.
    """
    fields = {name: getattr(message, name) for name in _PLAIN_SAMPLING}
    for name in _OPTIONAL_SAMPLING:
        if message.HasField(name):  # type: ignore[arg-type]
            fields[name] = getattr(message, name)
    return SamplingParams(
        stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **fields
    )


def logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """A token's log-probability."""
    top = [common_pb2.TopLogprob(token_id=t, logprob=value) for t, value in logprob.top]
    return common_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """A token's log-probability."""
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None is UNSPECIFIED."""
    return common_pb2.FinishReason.ValueType(reason.value if reason else 0)


def finish_reason_from_proto(value: int) -> FinishReason | None:
    """UNSPECIFIED is None."""
    return FinishReason(value) if value else None


def event_to_proto(event: LifetimeEvent) -> common_pb2.LifetimeEvent:
    """A lifetime event."""
    message = common_pb2.LifetimeEvent(
        kind=common_pb2.LifetimeEventKind.ValueType(event.kind.value),
        time_ns=event.time_ns,
        node=event.node,
    )
    if event.transfer is not None:
        message.transfer.transport = event.transfer.transport
        message.transfer.size_bytes = event.transfer.size_bytes
        message.transfer.duration_ns = event.transfer.duration_ns
    return message


def event_from_proto(message: common_pb2.LifetimeEvent) -> LifetimeEvent:
    """A lifetime event."""
    transfer = None
    if message.HasField("transfer"):
        moved = message.transfer
        transfer = KvTransfer(moved.transport, moved.size_bytes, moved.duration_ns)
    return LifetimeEvent(LifetimeEventKind(message.kind), message.time_ns, message.node, transfer)


def lifetime_to_proto(lifetime: Lifetime) -> common_pb2.Lifetime:
    """A whole life."""
    return common_pb2.Lifetime(
        request_id=lifetime.request_id,
        events=map(event_to_proto, lifetime.events),
        time_to_first_token_ns=lifetime.time_to_first_token_ns,
        outcome=lifetime.outcome,
    )


def lifetime_from_proto(message: common_pb2.Lifetime) -> Lifetime:
    """A whole life."""
    return Lifetime(
        message.request_id,
        [event_from_proto(event) for event in message.events],
        message.time_to_first_token_ns,
        message.outcome,
    )


def progress_to_proto(progress: Progress) -> work_pb2.Progress:
    """News of one answer."""
    message = work_pb2.Progress(
        ticket=progress.ticket,
        index=progress.index,
        token_ids=progress.token_ids,
        logprobs=map(logprob_to_proto, progress.logprobs),
        events=map(event_to_proto, progress.events),
        finish_reason=finish_reason_to_proto(progress.finish_reason),
        cached_tokens=progress.cached_tokens,
    )
    if progress.error is not None:
        message.error.code = progress.error.code
        message.error.message = progress.error.message
    return message


def progress_from_proto(message: work_pb2.Progress) -> Progress:
    """News of one answer."""
    failed = message.HasField("error")
    return Progress(
        message.ticket,
        list(message.token_ids),
        [logprob_from_proto(entry) for entry in message.logprobs],
        [event_from_proto(event) for event in message.events],
        finish_reason_from_proto(message.finish_reason),
        error_from_code(message.error.code, message.error.message) if failed else None,
        message.index,
        message.cached_tokens,
    )


def request_to_proto(request: Request) -> work_pb2.Assignment:
    """A request, for the node that is to serve it."""
    return work_pb2.Assignment(
        request_id=request.request_id,
        token_ids=request.token_ids,
        prompt_length=request.prompt_length,
        sampling=sampling_to_proto(request.sampling),
        ticket=request.ticket,
        indexes=request.indexes,
    )


def request_from_proto(message: work_pb2.Assignment) -> Request:
    """A request, as its node starts with it.

    Raises:
        InvalidArgumentError: Its sampling parameters or its answers are not allowed.
    """
    indexes = tuple(message.indexes) or (0,)
    if list(indexes) != sorted(set(indexes)):
        raise invalid("indexes", indexes, "each answer once, in ascending order")
    return Request(
        request_id=message.request_id,
        token_ids=list(message.token_ids),
        prompt_length=message.prompt_length,
        sampling=sampling_from_proto(message.sampling),
        ticket=message.ticket,
        indexes=indexes,
    )


def answers_from_proto(message: work_pb2.DecodeStart) -> list[Request]:
    """A request's answers, as a decode node starts with them: each one's last token has no KV.

    Where it comes early, that token is not there yet.

    Raises:
        InvalidArgumentError: They are not one token each, or something else is not allowed.
    """
    request, tokens = request_from_proto(message.assignment), list(message.next_token_ids)
    if tokens and len(tokens) != len(request.indexes):
        raise invalid("next_token_ids", len(tokens), f"{len(request.indexes)}, one per answer")
    nexts = [[token] for token in tokens] or [[] for _ in request.indexes]
    return [
        replace(
            request,
            token_ids=[*request.token_ids, *next_token],
            indexes=(index,),
            block_ids=[],
            prefix_keys=[],
            events=[],
        )
        for index, next_token in zip(request.indexes, nexts, strict=True)
    ]


_INFO_SCALARS = (
    "address",
    "epoch",
    "model",
    "model_fingerprint",
    "vocab_size",
    "kv_dtype",
    "block_size",
    "num_blocks",
    "max_model_len",
    "version",
    "prefix_cache",
)
_STATUS_SCALARS = (
    "blocks_total",
    "blocks_free",
    "blocks_cached",
    "blocks_owned",
    "blocks_leased",
    "blocks_quarantined",
    "waiting",
    "running",
    "importing",
    "computed_tokens_total",
    "sampled_tokens_total",
    "cached_tokens_total",
    "serving",
)


def node_info_to_proto(info: NodeInfo) -> node_pb2.NodeInfo:
    """What a node is."""
    return node_pb2.NodeInfo(
        kind=node_pb2.NodeKind.ValueType(info.kind.value),
        transports=info.transports,
        ranks=[
            node_pb2.RankInfo(weight_bytes=rank.weight_bytes, kv_bytes=rank.kv_bytes)
            for rank in info.ranks
        ],
        **{name: getattr(info, name) for name in _INFO_SCALARS},
    )


def node_info_from_proto(message: node_pb2.NodeInfo) -> NodeInfo:
    """What a node is."""
    return NodeInfo(
        kind=NodeKind(message.kind),
        transports=tuple(message.transports),
        ranks=tuple(RankInfo(rank.weight_bytes, rank.kv_bytes) for rank in message.ranks),
        **{name: getattr(message, name) for name in _INFO_SCALARS},
    )


def node_status_to_proto(status: NodeStatus) -> node_pb2.NodeStatus:
    """A node's blocks and queues."""
    return node_pb2.NodeStatus(
        info=node_info_to_proto(status.info),
        **{name: getattr(status, name) for name in _STATUS_SCALARS},
    )


def node_status_from_proto(message: node_pb2.NodeStatus) -> NodeStatus:
    """A node's blocks and queues."""
    return NodeStatus(
        info=node_info_from_proto(message.info),
        **{name: getattr(message, name) for name in _STATUS_SCALARS},
    )


_LAYOUT_FIELDS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "dtype",
    "layer_begin",
    "layer_end",
    "head_begin",
    "head_end",
)


def handle_to_proto(handle: KvHandle) -> kv_pb2.KvHandle:
    """Where a ticket's KV lies."""
    return kv_pb2.KvHandle(
        transport=handle.transport,
        growing=handle.growing,
        num_tokens=handle.num_tokens,
        block_ids=handle.block_ids,
        ranks=[
            kv_pb2.RankMemory(
                layout=kv_pb2.KvLayout(**{f: getattr(rank.layout, f) for f in _LAYOUT_FIELDS}),
                num_blocks=rank.num_blocks,
                location=rank.location,
            )
            for rank in handle.ranks
        ],
    )


def handle_from_proto(message: kv_pb2.KvHandle) -> KvHandle:
    """Where a ticket's KV lies.

    Raises:
        InvalidArgumentError: A layout contradicts itself.
    """
    ranks = tuple(
        RankMemory(
            layout=KVLayout(**{field: getattr(rank.layout, field) for field in _LAYOUT_FIELDS}),
            num_blocks=rank.num_blocks,
            location=rank.location,
        )
        for rank in message.ranks
    )
    return KvHandle(
        message.transport, message.num_tokens, tuple(message.block_ids), ranks, message.growing
    )
