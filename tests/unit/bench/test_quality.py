"""Perplexity is transformers', whatever chunks it is computed in."""

import math

import pytest
import torch

from bench import quality
from splitserve.model.config import ModelConfig
from splitserve.model.loader import load_decoder


def test_the_perplexity_of_a_text_is_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    judge = transformers.LlamaForCausalLM(config).eval()
    judge.save_pretrained(tmp_path)
    ids = torch.randint(0, 97, (50,))
    with torch.no_grad():
        logits = judge(ids[None]).logits[0, :-1]
    expected = math.exp(torch.nn.functional.cross_entropy(logits, ids[1:]))
    config = ModelConfig.from_dir(tmp_path)
    decoder = load_decoder(config, tmp_path, "float32")
    for chunk in (7, 49, 1000):
        monkeypatch.setattr(quality, "CHUNK_TOKENS", chunk)
        perplexity, likeliest = quality.read(decoder, config, ids.tolist())
        assert perplexity == pytest.approx(expected, rel=1e-4)
        assert torch.equal(likeliest, logits.argmax(-1))


def test_the_text_is_plain_and_of_a_few_kilobytes():
    assert 2_000 < len(quality.TEXT.read_text("utf-8")) < 10_000
