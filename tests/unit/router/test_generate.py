"""What a client gets from Generate when all goes well."""

from scripted_cluster import Cluster
from scripted_node import tokens_of

LENGTH = 2


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
