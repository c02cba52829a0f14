"""Two prefill and two decode nodes under many streams, a third of which is given up."""

import asyncio
import random

from splitserve.client import AsyncClient
from splitserve.core.sampling import SamplingParams

NUM_STREAMS = 64


def request(index: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(index)
    tokens = [rng.randrange(3, 512) for _ in range(rng.choice([1, 15, 60, 250, 800]))]
    temperature = rng.choice([0.0, 1.0])
    return tokens, SamplingParams(
        max_tokens=rng.choice([1, 8, 40, 120]), seed=index, temperature=temperature
    )


async def test_every_stream_that_stays_is_complete_and_right(wide_cluster, one_process):
    async with AsyncClient(wide_cluster.address) as client:

        async def stay(index: int) -> list[int]:
            tokens, sampling = request(index)
            generation = client.generate(token_ids=tokens, sampling=sampling)
            return list((await generation.completion()).token_ids)

        async def give_up(index: int) -> None:
            rng = random.Random(1000 + index)
            tokens, _ = request(index)
            sampling = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
            generation = client.generate(token_ids=tokens, sampling=sampling)
            # Phases: before anything, while prefill or hand-over runs, and among the tokens.
            for _ in range(rng.choice([0, 0, 1, 2, 10])):
                await anext(generation)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.2)
            generation.cancel()

        staying = [index for index in range(NUM_STREAMS) if index % 3]
        answers, _ = await asyncio.gather(
            asyncio.gather(*(stay(index) for index in staying)),
            asyncio.gather(*(give_up(index) for index in range(0, NUM_STREAMS, 3))),
        )
        status = await client.status()
    for index, answer in zip(staying, answers, strict=True):
        assert answer == one_process.generate(*request(index)).token_ids, f"stream {index}"
    worked = [node for node in status.nodes if node.computed_tokens_total]
    assert len(worked) == 4, "every node had a share"
    assert status.finished["cancelled"] >= 1


def test_offline_prompts_come_back_in_order(wide_cluster):
    prompts = [f"The ferry number {index} leaves at" for index in range(20)]
    sampling = SamplingParams(max_tokens=6, temperature=0)
    together = wide_cluster.generate(prompts, sampling)
    with wide_cluster.client() as client:
        alone = [client.generate(prompt, sampling=sampling).completion() for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
