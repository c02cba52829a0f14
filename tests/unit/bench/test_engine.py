"""The engine question needs somebody to compare with, and knows what nobody can surpass."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from bench.__main__ import main
from bench.engine import EngineQuestion, measure
from bench.engines.case import Decode, Prefill, prompts
from bench.engines.limits import Hardware, ModelCost
from bench.engines.roster import PEERS, Places, find
from bench.report import Skipped
from splitserve.model.config import ModelConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
BODY = 8 * 16 + 8
HEAD = 100 * 8

HARDWARE = Hardware(bandwidth=1e6, matmul=1e9)


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        "model.embed_tokens.weight": np.zeros((100, 8), np.float16),
        "model.layers.0.mlp.up_proj.weight": np.zeros((16, 8), np.float16),
        "model.norm.weight": np.zeros(8, np.float16),
        # Some checkpoints hold a tied table twice; it is read once.
        "lm_head.weight": np.zeros((100, 8), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def cost(model) -> ModelCost:
    return ModelCost.of(model, ModelConfig.from_dir(model), "bfloat16")


async def test_without_transformers_it_is_skipped_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    question = EngineQuestion(
        Path("unused"), "auto", "none", 1, 1, [Prefill(8)], "transformers", Places()
    )
    with pytest.raises(Skipped, match="pip install"):
        await measure(question)


def test_a_peer_that_is_not_here_is_skipped_in_one_line(model):
    arguments = ["engine", "--model", str(model), "--peer", "vllm", "--peer", "llama"]
    outcome = CliRunner().invoke(main, arguments, env={"SPLITSERVE_BENCH_VLLM_PYTHON": ""})
    assert outcome.exit_code == 0
    lines = outcome.output.split("\n")
    assert [line for line in lines if line] == [
        "engine: skipped: no vLLM: --vllm-python names none; bench/README.md says how to get it",
        "engine: skipped: no llama.cpp: --llama-program and --llama-gguf name none; "
        "bench/README.md says how to get it",
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--peer", "nobody"),
        ("--vllm-python", "/not/there"),
        ("--llama-program", __file__),
        ("--llama-gguf", "/not/there"),
        ("--batch", "0"),
    ],
)
def test_an_option_that_cannot_be_is_named(model, option, value):
    outcome = CliRunner().invoke(main, ["engine", "--model", str(model), option, value])
    assert outcome.exit_code == 2
    assert option in outcome.output


def test_what_is_expected_of_each_peer(tmp_path):
    places = Places(tmp_path, tmp_path, tmp_path)
    transformers, vllm, llama = (find(name, places) for name in PEERS)
    assert [peer.expected(Prefill(512)) for peer in (transformers, vllm, llama)] == [
        0.9, 1.05, None
    ]  # fmt: skip
    assert [transformers.expected(Decode(batch, 256)) for batch in (1, 4, 16, 64)] == [
        1.5, 1.5, 2.5, None
    ]  # fmt: skip
    for context in (256, 1024):
        assert [vllm.expected(Decode(batch, context)) for batch in (1, 4, 16, 64)] == [
            None, 1.1, 1.1, 1.1
        ]  # fmt: skip
        assert [llama.expected(Decode(batch, context)) for batch in (1, 4)] == [1.0, None]


def test_a_decode_step_reads_the_weights_once_and_every_sequence_s_kv(cost):
    kv_of_a_token = 3 * 2 * 2 * 2 * 2  # layers, keys and values, KV heads, head size, bytes
    step_bytes = 2 * (BODY + HEAD) + 4 * (10 + 16) * kv_of_a_token
    assert cost.rate(Decode(4, 10), HARDWARE) == pytest.approx(4 * 1e6 / step_bytes)


def test_a_decode_step_reads_a_byte_of_each_8_bit_weight(model):
    cost = ModelCost.of(model, ModelConfig.from_dir(model), "bfloat16", "int8")
    step_bytes = BODY + HEAD + 4 * (10 + 16) * 3 * 2 * 2 * 2 * 2
    assert cost.rate(Decode(4, 10), HARDWARE) == pytest.approx(4 * 1e6 / step_bytes)


def test_a_prompt_is_multiplied_with_the_body_and_its_last_token_with_the_head(cost):
    attention = 3 * 4 * (4 * 2) * (1 + 2 + 3 + 4 + 5)  # layers, operations, heads, tokens seen
    operations = 2 * BODY * 5 + 2 * HEAD + attention
    assert cost.rate(Prefill(5), HARDWARE) == pytest.approx(5 * 1e9 / operations)


def test_layers_with_a_window_see_no_further(model):
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(CONFIG | window | {"sliding_window": 2}))
    cost = ModelCost.of(model, ModelConfig.from_dir(model), "bfloat16")
    operations = 2 * BODY * 5 + 2 * HEAD + 3 * 4 * (4 * 2) * (1 + 2 + 2 + 2 + 2)
    assert cost.rate(Prefill(5), HARDWARE) == pytest.approx(5 * 1e9 / operations)


def test_of_two_measurements_the_undisturbed_one_counts():
    assert Hardware(1.0, 4.0).best(Hardware(2.0, 3.0)) == Hardware(2.0, 4.0)


def test_both_sides_get_the_same_prompts_and_every_round_others():
    assert prompts(1, 2, 8, 100) == prompts(1, 2, 8, 100)
    assert prompts(1, 2, 8, 100) != prompts(2, 2, 8, 100)
