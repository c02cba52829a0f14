"""Every family answers what transformers answers, from checkpoints that transformers wrote."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from splitserve.core.errors import InvalidArgumentError
from splitserve.model.config import ModelConfig
from splitserve.model.registry import architectures

WINDOW = 9
MULTI_HEAD: dict[str, Any] = {"num_key_value_heads": None}
GPT2: dict[str, Any] = {
    "family": "GPT2",
    "model_class": "GPT2LMHeadModel",
    "intermediate_size": None,
    **MULTI_HEAD,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "Llama"},
    "mistral": {"family": "Mistral", "sliding_window": WINDOW},
    "qwen2": {"family": "Qwen2"},
    "qwen2_window": {
        "family": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "Qwen3", "num_attention_heads": 4},
    "qwen3_one_kv_head": {"family": "Qwen3", "num_key_value_heads": 1},
    "phi3": {"family": "Phi3", "sliding_window": WINDOW, "pad_token_id": 0},
    "phi3_partial": {"family": "Phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "gemma2": {"family": "Gemma2", "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
    "gemma3": {
        "family": "Gemma3",
        "config_class": "Gemma3TextConfig",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "opt": {"family": "OPT", "ffn_dim": 112, "word_embed_proj_dim": 96, **MULTI_HEAD},
    "gpt2": GPT2,
    "gpt2_narrow": {**GPT2, "n_inner": 80},
    "gpt_neox": {"family": "GPTNeoX", **MULTI_HEAD},
    "gpt_neox_serial": {"family": "GPTNeoX", "use_parallel_residual": False, **MULTI_HEAD},
    "mixtral": {"family": "Mixtral", "num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {
        "family": "Qwen3Moe",
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        **EXPERTS,
    },
}

PROMPTS = [1, 2, 5, 11, 17, 24, 33, 70]
"""Lengths; most are longer than the window."""

NEW_TOKENS = 32
TOLERANCE = 1e-4
BLOCK_SIZE = 8


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 199, (length,), generator=generator).tolist() for length in PROMPTS]


def test_every_architecture_is_tried(write_checkpoint: Callable[..., Any]) -> None:
    tried = {
        ModelConfig.from_dir(write_checkpoint(**f).path).architecture for f in FAMILIES.values()
    }
    assert tried == set(architectures())


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_prompts_is_answered_as_by_transformers(
    write_checkpoint: Callable[..., Any], name: str
) -> None:
    checkpoint = write_checkpoint(**FAMILIES[name])
    assert_answers(checkpoint, answers(checkpoint.load()))


def answers(runner: Any) -> torch.Tensor:
    """Log-probabilities of what follows each prompt, all in one batch: ``[B, T, V]``."""
    width = -(-(max(PROMPTS) + NEW_TOKENS) // BLOCK_SIZE)
    cache = runner.cache(width * len(PROMPTS), BLOCK_SIZE)
    tables = [list(range(row * width, (row + 1) * width)) for row in range(len(PROMPTS))]
    texts = prompts()
    rows = [(text, 0, table, True) for text, table in zip(texts, tables, strict=True)]
    log_probs = [runner.step(rows, cache)]
    for _ in range(NEW_TOKENS - 1):
        tokens = log_probs[-1].argmax(-1).tolist()
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        rows = [
            (text[-1:], len(text) - 1, table, True)
            for text, table in zip(texts, tables, strict=True)
        ]
        log_probs.append(runner.step(rows, cache))
    return torch.stack(log_probs, dim=1)


def assert_answers(checkpoint: Any, ours: torch.Tensor) -> None:
    for prompt, answer in zip(prompts(), ours, strict=True):
        tokens = answer.argmax(-1).tolist()
        assert tokens == checkpoint.greedy(prompt, NEW_TOKENS)
        theirs = checkpoint.log_probs(prompt + tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(answer, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: True",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: False"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act: .*tanh"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    write_checkpoint: Callable[..., Any], name: str, change: dict[str, Any], message: str
) -> None:
    checkpoint = write_checkpoint(**FAMILIES[name], **change)
    with pytest.raises(InvalidArgumentError, match=message):
        checkpoint.load()
