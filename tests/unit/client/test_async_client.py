import asyncio
from contextlib import suppress

import pytest
from scripted_router import WHOLE_LIFE, ScriptedRouter, eventually_async, last, piece

from splitserve.client import AsyncClient, Usage
from splitserve.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.core.request import FinishReason
from splitserve.core.sampling import SamplingParams


async def test_deltas_arrive_in_order_and_the_last_one_tells_the_whole_story(
    router: ScriptedRouter, address: str
) -> None:
    router.script = [piece("Hel", 5), piece("lo", 6, 7), last()]
    async with AsyncClient(address) as client:
        deltas = [d async for d in client.generate("hi", sampling=SamplingParams(seed=3))]
    assert [d.text for d in deltas] == ["Hel", "lo", ""]
    assert [d.token_ids for d in deltas] == [(5,), (6, 7), ()]
    assert [d.finish_reason for d in deltas] == [None, None, FinishReason.STOP]
    assert deltas[0].usage is None
    assert deltas[0].lifetime is None
    assert deltas[-1].usage == Usage(3, 2)
    assert deltas[-1].lifetime == WHOLE_LIFE
    assert router.requests[0].sampling.seed == 3


async def test_completion_puts_the_deltas_together(router: ScriptedRouter, address: str) -> None:
    router.script = [piece("Hel", 5), last("lo", 6)]
    async with AsyncClient(address) as client:
        answer = await client.generate(token_ids=[1, 2]).completion()
    assert (answer.text, answer.token_ids) == ("Hello", (5, 6))
    assert answer.finish_reason is FinishReason.STOP
    assert list(router.requests[0].token_ids.ids) == [1, 2]


async def test_break_ends_the_request_on_the_router(router: ScriptedRouter, address: str) -> None:
    router.script = [piece("a"), "hang"]
    async with AsyncClient(address) as client:
        async for _ in client.generate("hi"):
            break
        await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")


async def test_leaving_the_block_ends_a_request_that_has_a_name(
    router: ScriptedRouter, address: str
) -> None:
    router.script = [piece("a"), "hang"]
    async with AsyncClient(address) as client:
        async with client.generate("hi") as generation:
            async for _ in generation:
                break
        await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")


async def test_an_exception_in_the_loop_ends_the_request(
    router: ScriptedRouter, address: str
) -> None:
    router.script = [piece("a"), "hang"]
    async with AsyncClient(address) as client:
        with suppress(ZeroDivisionError):
            async for _ in client.generate("hi"):
                raise ZeroDivisionError
        await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")


async def test_a_cancelled_task_ends_its_request_and_stays_cancelled(
    router: ScriptedRouter, address: str
) -> None:
    router.script = ["hang"]
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate("hi").completion())
        await eventually_async(lambda: router.running == 1, "the request runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")


async def test_cancel_from_elsewhere_is_an_error_of_the_request_and_not_of_the_task(
    router: ScriptedRouter, address: str
) -> None:
    router.script = ["hang"]
    async with AsyncClient(address) as client:
        generation = client.generate("hi")
        task = asyncio.create_task(generation.completion())
        await eventually_async(lambda: router.running == 1, "the request runs")
        generation.cancel()
        with pytest.raises(CancelledError):
            await task


async def test_a_stream_without_a_finish_reason_is_a_failure_and_not_a_short_answer(
    router: ScriptedRouter, address: str
) -> None:
    router.script = [piece("half an ans")]
    async with AsyncClient(address) as client:
        with pytest.raises(InternalError, match="without a finish reason"):
            await client.generate("hi").completion()


async def test_an_error_after_some_deltas_reaches_the_caller_with_its_message(
    router: ScriptedRouter, address: str
) -> None:
    router.script = [piece("a"), ResourceExhaustedError("max_queued_requests: 3 wait")]
    async with AsyncClient(address) as client:
        generation = client.generate("hi")
        assert (await anext(generation)).text == "a"
        with pytest.raises(ResourceExhaustedError, match="max_queued_requests: 3 wait"):
            await anext(generation)


async def test_a_timeout_ends_the_request_on_both_sides(
    router: ScriptedRouter, address: str
) -> None:
    router.script = ["hang"]
    async with AsyncClient(address) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("hi", timeout=0.2).completion()
        await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")


async def test_no_router_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.generate("hi").completion()
        with pytest.raises(UnavailableError):
            await client.status()


async def test_abort_lifetime_and_status_speak_the_vocabulary(
    router: ScriptedRouter, address: str
) -> None:
    async with AsyncClient(address) as client:
        await client.abort("r1")
        with pytest.raises(NotFoundError, match="r2"):
            await client.abort("r2")
        assert await client.lifetime("r1") == WHOLE_LIFE
        status = await client.status()
    assert (status.queued, status.running, status.finished) == (1, 2, {"stop": 7})
    assert status.nodes[0].info.name == "prefill@127.0.0.1:1"


async def test_closing_the_client_ends_what_runs(router: ScriptedRouter, address: str) -> None:
    router.script = ["hang"]
    async with AsyncClient(address) as client:
        generation = client.generate("hi")
        await eventually_async(lambda: router.running == 1, "the request runs")
    await eventually_async(lambda: router.cancelled == 1, "the call was cancelled")
    del generation
