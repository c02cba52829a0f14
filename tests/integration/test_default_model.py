"""The default model through prefill + decode, judged by transformers in float32."""

import asyncio
import os
import random

import pytest
from clusters import assert_settled

from splitserve.client import AsyncClient
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster
from splitserve.model.importer import default_model
from splitserve.text.chat import ChatMessage, ChatTemplate
from splitserve.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NEW_TOKENS = 64
LONG_PROMPT_TOKENS = 2_000

TEXTS = [
    "The ferry leaves the harbour at seven, and whoever is late",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "import json\n\nclass Config:\n    def __init__(self, path):\n        self.path = path\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "for (int i = 0; i < n; ++i) {\n    sum +=",
    "The capital of France is",
    "Water boils at 100 degrees because",
    "1, 2, 4, 8, 16, 32,",
    "Dear Ms. Alvarez,\n\nThank you for your letter of",
    "🙂🚀 The three emojis that best describe the sea are",
    "La mer est calme ce matin et le pêcheur",
    "Q: What is the largest planet of the solar system?\nA:",
    "- eggs\n- flour\n- butter\n-",
    "Abstract. We present a system that serves large language models with",
]  # fmt: skip
CHATS = [
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about a lighthouse.",
    "List three uses of a paper clip. 📎",
    "What is 17 + 25?",
]


def greedy(**extra) -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, temperature=0, **extra)


@pytest.fixture(scope="module")
def model():
    return default_model()


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    """Twenty prompts as tokens: prose, code, chats, emoji, and a long one."""
    tokenizer, template = Tokenizer.from_dir(model), ChatTemplate.from_dir(model)
    texts = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    chats = [
        tokenizer.encode(template.render([ChatMessage("user", text)]), add_special_tokens=False)
        for text in CHATS
    ]
    rng = random.Random(0)
    prose = " ".join(rng.choice(TEXTS) for _ in range(400))
    long = tokenizer.encode(prose, add_special_tokens=True)[:LONG_PROMPT_TOKENS]
    assert len(long) == LONG_PROMPT_TOKENS
    return [*texts, *chats, long]


def _generate(torch, judge, prompts):
    """Together, padded on the left: many times faster than one by one, and exact in float32."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    judge.generation_config.pad_token_id = 0
    out = judge.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    eos = judge.generation_config.eos_token_id
    for row, tokens in enumerate(out.sequences[:, width:].tolist()):
        if eos in tokens:
            del tokens[tokens.index(eos) + 1 :]
        logprobs = [
            torch.log_softmax(out.logits[step][row], -1)[token].item()
            for step, token in enumerate(tokens)
        ]
        yield tokens, logprobs


@pytest.fixture(scope="module")
def judged(model, prompts):
    """What transformers' own generate answers, and the log-probabilities it gives each token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # Every core: no cluster of this model is up yet, and the tiny ones stand idle.
    torch.set_num_threads(os.cpu_count())
    judge = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    *short, long = prompts
    answers = [*_generate(torch, judge, short), *_generate(torch, judge, [long])]
    torch.set_num_threads(1)
    return answers


@pytest.fixture(scope="module")
def cluster(model, judged, no_leaks):
    # After the judge: never two model processes for the same cores.
    with LocalCluster(
        model,
        prefill_options={"dtype": "float32", "block_size": 16, "max_tokens_per_batch": 192},
        decode_options={"dtype": "float32", "block_size": 32},
    ) as cluster:
        yield cluster
        with cluster.client() as client:
            assert_settled(client)


async def answer_all(address: str, prompts, sampling):
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(
                client.generate(token_ids=prompt, sampling=sampling).completion()
                for prompt in prompts
            )
        )


async def test_twenty_prompts_greedy_are_token_identical_to_transformers(cluster, prompts, judged):
    answers = await answer_all(cluster.address, prompts, greedy(logprobs=0))
    for index, (answer, (tokens, logprobs)) in enumerate(zip(answers, judged, strict=True)):
        assert list(answer.token_ids) == tokens, f"prompt {index}"
        ours = [entry.logprob for entry in answer.logprobs]
        assert ours == pytest.approx(logprobs, abs=1e-4), f"prompt {index}"


async def test_seeded_sampling_gives_the_same_tokens_alone_and_in_a_batch_of_16(cluster, prompts):
    sampling = SamplingParams(max_tokens=24, seed=1234, temperature=0.9, top_p=0.95)
    together = await answer_all(cluster.address, prompts[:16], sampling)
    for index in (0, 7, 15):
        [alone] = await answer_all(cluster.address, [prompts[index]], sampling)
        assert alone.token_ids == together[index].token_ids, f"prompt {index}"


def test_a_chat_is_answered_in_real_sentences(cluster):
    with cluster.client() as client:
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.generate(chat=chat, sampling=greedy()).completion()
    assert "Paris" in answer.text
    assert answer.finish_reason.name == "STOP"


async def test_three_tensor_ranks_to_two_stages_are_token_identical_too(
    model, prompts, judged, no_leaks
):
    chosen = range(0, len(prompts) - 1, 4)
    options = {"dtype": "float32", "threads": 1, "num_blocks": 256}
    with LocalCluster(
        model,
        prefill_options=options | {"tensor_parallel_size": 3},
        decode_options=options | {"pipeline_parallel_size": 2},
    ) as cluster:
        answers = await answer_all(
            cluster.address, [prompts[index] for index in chosen], greedy(logprobs=0)
        )
        for index, answer in zip(chosen, answers, strict=True):
            tokens, logprobs = judged[index]
            assert list(answer.token_ids) == tokens, f"prompt {index}"
            ours = [entry.logprob for entry in answer.logprobs]
            assert ours == pytest.approx(logprobs, abs=1e-4), f"prompt {index}"
        with cluster.client() as client:
            assert_settled(client)
