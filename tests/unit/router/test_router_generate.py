"""What a client gets from Generate."""

import asyncio
from typing import Any

import grpc
import pytest
from scripted_cluster import Cluster, read
from scripted_node import ScriptedNode, decode, ignore, prefill, token_at, tokens_of, until

from splitserve.core.lifetime import LifetimeEventKind as Kind
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

STOP, LENGTH, ABORTED = 1, 2, 3


async def test_answer_streams_through_both_nodes_with_usage_and_ordered_lifetime(
    cluster: Cluster,
) -> None:
    await cluster.prefill()
    await cluster.decode()
    reply = await cluster.ask([1, 2, 3], max_tokens=20)
    assert reply.token_ids == tokens_of(3, 20)
    assert reply.text == cluster.router.members.model.tokenizer.decode(reply.token_ids)
    assert reply.last.finish_reason == LENGTH
    assert (reply.last.usage.prompt_tokens, reply.last.usage.completion_tokens) == (3, 20)
    assert reply.events == [
        "ISSUED",
        "PREFILL_BEGIN",
        "PREFILL_END",
        "MIGRATION_BEGIN",
        "MIGRATION_END",
        "DECODE_BEGIN",
        "DECODE_END",
        "FINISHED",
    ]
    assert reply.last.lifetime.outcome == "length"
    assert all(message.finish_reason == 0 for message in reply.messages[:-1])
    assert cluster.tickets == 0


async def test_nodes_get_every_field_set_and_no_text(cluster: Cluster) -> None:
    first, second = await cluster.prefill(), await cluster.decode()
    await cluster.ask([1, 2, 3], max_tokens=4, stop=["never seen"])
    prefilled, decoded = first.starts[0].assignment, second.starts[0].assignment
    assert list(prefilled.token_ids) == [1, 2, 3]
    assert list(decoded.token_ids) == [1, 2, 3], "what has KV"
    assert list(second.starts[0].next_token_ids) == [token_at(3)]
    assert decoded.prompt_length == 3
    assert decoded.ticket == prefilled.ticket
    assert second.starts[0].source_address == first.info.address
    assert second.starts[0].source_epoch == first.info.epoch
    assert prefilled.sampling.HasField("seed")
    assert not prefilled.sampling.stop


async def test_one_token_needs_no_decode_node(cluster: Cluster) -> None:
    await cluster.prefill()
    second = await cluster.decode()
    reply = await cluster.ask(max_tokens=1)
    assert len(reply.token_ids) == 1
    assert reply.last.finish_reason == LENGTH
    assert reply.last.lifetime.time_to_first_token_ns > 0
    assert not second.starts


async def test_first_token_at_eos_is_an_empty_text_and_needs_no_decode_node(
    cluster: Cluster,
) -> None:
    def at_once(node: ScriptedNode, start: Any) -> None:
        node.tell(start.assignment.ticket, [2], [Kind.PREFILL_END], finish_reason=STOP)

    first = await cluster.prefill(at_once)
    second = await cluster.decode()
    reply = await cluster.ask(max_tokens=10)
    assert (reply.text, reply.last.finish_reason) == ("", STOP)
    assert not second.starts
    assert not first.cancels


@pytest.mark.parametrize("together", [False, True], ids=["a message each", "one message"])
async def test_stop_string_across_tokens_is_cut_and_both_forms_agree(
    cluster: Cluster, together: bool
) -> None:
    def all_at_once(node: ScriptedNode, start: Any) -> None:
        ticket = start.assignment.ticket
        node.tell(ticket, tokens_of(4, 29), [Kind.MIGRATION_END, Kind.DECODE_BEGIN])

    await cluster.prefill()
    second = await cluster.decode(all_at_once if together else decode)
    full = cluster.router.members.model.tokenizer.decode(tokens_of(3, 30))
    stop = full[9:14]
    reply = await cluster.ask(max_tokens=30, stop=[stop])
    assert reply.text == full[: full.index(stop)]
    assert reply.last.finish_reason == STOP
    ids = reply.token_ids
    assert ids == tokens_of(3, len(ids))
    decoded = cluster.router.members.model.tokenizer.decode
    assert stop in decoded(ids)
    assert stop not in decoded(ids[:-1])
    await until(lambda: second.cancels == [second.starts[0].assignment.ticket] or not together)
    assert reply.events[-2:] == ["DECODE_END", "FINISHED"]


async def test_logprobs_are_aligned_with_tokens(cluster: Cluster) -> None:
    def entry(token_id: int) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=-token_id)

    def first(node: ScriptedNode, start: Any) -> None:
        node.tell(start.assignment.ticket, [7], logprobs=[entry(7)])

    def rest(node: ScriptedNode, start: Any) -> None:
        ticket = start.assignment.ticket
        node.tell(ticket, [8, 9], logprobs=[entry(8), entry(9)])
        node.tell(ticket, [10], logprobs=[entry(10)], finish_reason=LENGTH)

    await cluster.prefill(first)
    await cluster.decode(rest)
    reply = await cluster.ask(max_tokens=4, logprobs=0)
    assert reply.token_ids == [7, 8, 9, 10]
    for message in reply.messages:
        assert [e.token_id for e in message.logprobs] == list(message.token_ids)


async def test_chats_and_texts_become_tokens(cluster: Cluster) -> None:
    cluster.router.members.model = cluster.roomy_model(100_000)
    first = await cluster.prefill(max_model_len=100_000)
    await cluster.decode(max_model_len=100_000)
    chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content="hello")])
    sampling = common_pb2.SamplingParams(max_tokens=2)
    await read(cluster.stub.Generate(router_pb2.GenerateRequest(chat=chat, sampling=sampling)))
    text = "tall ships " * 1000
    await read(cluster.stub.Generate(router_pb2.GenerateRequest(prompt=text, sampling=sampling)))
    decoded = cluster.router.members.model.tokenizer.decode
    chat_ids, text_ids = (list(start.assignment.token_ids) for start in first.starts)
    assert decoded(chat_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(text_ids) == text


async def test_slow_reader_coalesces_and_stalls_nobody(cluster: Cluster) -> None:
    tokens = 6000
    roomy = {"max_model_len": 100_000}

    def long(node: ScriptedNode, start: Any) -> None:
        asyncio.get_running_loop().create_task(emit(node, start))

    async def emit(node: ScriptedNode, start: Any) -> None:
        # Log-probabilities make messages large, so that the slow reader's window fills up.
        padding = [common_pb2.TopLogprob(token_id=n, logprob=-n) for n in range(20)]
        end = start.assignment.prompt_length + start.assignment.sampling.max_tokens
        for position in range(len(start.assignment.token_ids) + 1, end):
            entry = common_pb2.TokenLogprob(token_id=token_at(position), top=padding)
            last = LENGTH if position == end - 1 else 0
            ticket = start.assignment.ticket
            node.tell(ticket, [token_at(position)], logprobs=[entry], finish_reason=last)
            if position % 50 == 0:
                await asyncio.sleep(0)

    cluster.router.members.model = cluster.roomy_model(100_000)
    await cluster.prefill(**roomy)
    node = await cluster.decode(long, **roomy)
    # A small window, as a far client has: the router cannot just push everything down the wire.
    window = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.aio.insecure_channel(cluster.router.address, options=window)
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=common_pb2.SamplingParams(max_tokens=tokens, logprobs=20),
    )
    slow: Any = router_pb2_grpc.RouterStub(channel).Generate(request, timeout=60)
    messages = [await slow.read()]
    await until(lambda: node.starts)
    fast = await cluster.ask(max_tokens=50)
    assert fast.token_ids == tokens_of(3, 50)
    # The slow one's answer is complete in the router, and its nodes are free, before it is read.
    await until(lambda: cluster.tickets == 0)
    while (message := await slow.read()) is not grpc.aio.EOF:
        messages.append(message)
    ids = [token_id for message in messages for token_id in message.token_ids]
    assert ids == tokens_of(3, tokens)
    assert len(messages) < tokens / 2
    assert messages[-1].finish_reason == LENGTH
    await channel.close()


async def test_a_running_request_id_is_refused_and_a_finished_one_may_come_again(
    cluster: Cluster,
) -> None:
    first = await cluster.prefill(ignore)
    await cluster.decode()
    running = cluster.call(request_id="mine")
    await until(lambda: first.starts)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(request_id="mine")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    running.cancel()
    await until(lambda: cluster.router.tracker.idle)
    first.behave = prefill
    assert (await cluster.ask(request_id="mine", max_tokens=2)).last.finish_reason == LENGTH


async def test_more_than_max_queued_requests_are_refused_at_the_door(cluster: Cluster) -> None:
    cluster.router.tracker._max_queued = 2
    first = await cluster.prefill(ignore)
    await cluster.decode()
    waiting = [cluster.call() for _ in range(2)]
    await until(lambda: len(first.starts) == 2)
    with pytest.raises(grpc.aio.AioRpcError, match="max_queued_requests is 2") as caught:
        await cluster.ask()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in waiting:
        call.cancel()


async def test_status_and_lifetime_tell_what_is_and_was(cluster: Cluster) -> None:
    first = await cluster.prefill()
    second = await cluster.decode(lambda node, start: decode(node, start, steps=2))
    call = cluster.call(request_id="running", max_tokens=50)
    await call.read()
    status = await cluster.stub.GetStatus(router_pb2.GetStatusRequest())
    assert (status.queued, status.running, len(status.nodes)) == (0, 1, 2)
    lifetime = await cluster.stub.GetLifetime(router_pb2.GetLifetimeRequest(request_id="running"))
    assert lifetime.outcome == ""
    call.cancel()
    await until(lambda: cluster.router.tracker.idle)
    lifetime = await cluster.stub.GetLifetime(router_pb2.GetLifetimeRequest(request_id="running"))
    assert lifetime.outcome == "cancelled"
    first.answers_status = second.answers_status = False
    status = await cluster.stub.GetStatus(router_pb2.GetStatusRequest())
    assert [node.serving for node in status.nodes] == [False, False]
    assert dict(status.finished) == {"cancelled": 1}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.GetLifetime(router_pb2.GetLifetimeRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
