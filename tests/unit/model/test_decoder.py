"""Tokens and log-probabilities are those of transformers, however a prompt is computed."""

from typing import Any

import pytest
import torch

from splitserve import native

TOLERANCE = 1e-4
BLOCKS = [5, 3, 9, 11, 1, 0, 7, 2, 13, 22, 21, 20, 19, 18, 17, 16, 15, 14]


@pytest.fixture(params=["native", "torch"], autouse=True)
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every promise holds with the kernels and without them."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", False)
    elif not native.available:
        pytest.skip("the kernels are not built")


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_heads": {},
    "every_head_its_own": {"num_key_value_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": rope("yarn", factor=8.0, original_max_position_embeddings=64),
    "yarn_mscale": rope(
        "yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8
    ),
    "sliding_window": {"family": "Mistral", "sliding_window": 13},
    "no_sliding_window": {"family": "Mistral", "sliding_window": None},
}


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 199, (length,), generator=generator).tolist()
    return ids


def in_chunks(runner: Any, ids: list[int], sizes: list[int], block_size: int) -> torch.Tensor:
    """Log-probabilities after each chunk."""
    cache = runner.cache(len(BLOCKS) + 10, block_size)
    rows, start = [], 0
    for size in sizes:
        chunk = ids[start : start + size]
        rows.append(runner.step([(chunk, start, BLOCKS, True)], cache))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_and_chunked_prompts_match_transformers(write_checkpoint: Any, variant: str) -> None:
    checkpoint = write_checkpoint(**VARIANTS[variant])
    runner = checkpoint.load()
    ids = prompt(1, 90)
    expected = checkpoint.log_probs(ids)
    whole = in_chunks(runner, ids, [90], 8)
    torch.testing.assert_close(whole[0], expected[-1], atol=TOLERANCE, rtol=0)
    sizes = [1, 5, 20, 1, 1, 17, 2, 43]
    ends = torch.tensor(sizes).cumsum(0) - 1
    chunked = in_chunks(runner, ids, sizes, 8)
    torch.testing.assert_close(chunked, expected[ends], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["grouped_heads", "sliding_window"])
def test_prefill_then_decode_is_token_identical_with_generate(
    write_checkpoint: Any, variant: str
) -> None:
    checkpoint = write_checkpoint(**VARIANTS[variant])
    runner = checkpoint.load()
    ids = prompt(2, 21)
    cache = runner.cache(40, 4)
    blocks = BLOCKS[:12]
    tokens = [int(runner.step([(ids, 0, blocks, True)], cache).argmax())]
    while len(tokens) < 24:
        start = len(ids) + len(tokens) - 1
        tokens.append(int(runner.step([(tokens[-1:], start, blocks, True)], cache).argmax()))
    assert tokens == checkpoint.greedy(ids, 24)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_block_size_changes_nothing(llama: Any, block_size: int) -> None:
    runner = llama.load()
    ids = prompt(3, 18)
    expected = llama.log_probs(ids)
    got = in_chunks(runner, ids, [7, 1, 9, 1], block_size)
    torch.testing.assert_close(got, expected[[6, 7, 16, 17]], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["grouped_heads", "sliding_window"])
def test_a_row_gets_the_same_in_any_company(write_checkpoint: Any, variant: str) -> None:
    checkpoint = write_checkpoint(**VARIANTS[variant])
    runner = checkpoint.load()
    lengths = [3, 40, 41, 12, 64, 27]
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    cache = runner.cache(60, 8)
    tables = [list(range(9 * row, 9 * row + 9)) for row in range(6)]
    # First all but the last token, of some only a part: chunks in one step, no logits wanted.
    first = [(p[:-1], 0, t, False) for p, t in zip(prompts, tables, strict=True)]
    first[1] = (prompts[1][:20], 0, tables[1], False)
    assert runner.step(first, cache).shape == (0, 199)
    # Then single tokens of very different lengths beside a chunk in the middle.
    second = [
        (p[-1:], len(p) - 1, t, index != 3)
        for index, (p, t) in enumerate(zip(prompts, tables, strict=True))
    ]
    second[1] = (prompts[1][20:], 20, tables[1], True)
    got = runner.step(second, cache)
    wanted = [prompts[index] for index in (0, 1, 2, 4, 5)]
    expected = torch.stack([checkpoint.log_probs(p)[-1] for p in wanted])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_what_others_left_in_a_block_never_reaches_an_answer(llama: Any) -> None:
    runner = llama.load()
    ids = prompt(5, 20)
    expected = llama.log_probs(ids)[-4:]
    for left in (float("nan"), float("inf")):
        cache = runner.cache(30, 8, left)
        runner.step([(ids[:16], 0, BLOCKS, False)], cache)
        got = [runner.step([(ids[n : n + 1], n, BLOCKS, True)], cache) for n in range(16, 20)]
        torch.testing.assert_close(torch.cat(got), expected, atol=TOLERANCE, rtol=0)


def test_a_step_writes_only_its_own_blocks(llama: Any) -> None:
    runner = llama.load()
    cache = runner.cache(12, 8, 7.0)
    runner.step([(prompt(6, 12), 0, [4, 9], True), ([3], 0, [2], True)], cache)
    others = [block for block in range(12) if block not in (2, 4, 9)]
    assert bool((cache[others] == 7.0).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_and_chunks_agree(llama: Any, dtype: str) -> None:
    from splitserve.model.config import ModelConfig
    from splitserve.model.decoder import ModelInput
    from splitserve.model.loader import load_decoder

    config = ModelConfig.from_dir(llama.path)
    decoder = load_decoder(config, llama.path, dtype, dummy_seed=None, progress=None)
    ids = prompt(7, 30)
    expected = llama.log_probs(ids)[-1].exp()
    cache = torch.zeros(30, 3, 2, 2, 8, 16, dtype=decoder.dtype)
    decoder.forward(ModelInput.from_rows([(ids[:20], 0, BLOCKS, False)], 8), cache)
    decoder.forward(ModelInput.from_rows([(ids[20:29], 20, BLOCKS, False)], 8), cache)
    logits = decoder.forward(ModelInput.from_rows([(ids[29:], 29, BLOCKS, True)], 8), cache)
    assert logits.dtype is torch.float32
    assert float((logits[0].softmax(-1) - expected).abs().max()) < 0.1
