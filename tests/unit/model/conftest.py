"""Tiny checkpoints, written by transformers, which is then the judge of what we make of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve import native
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import Decoder, ModelInput
from splitserve.model.loader import load_decoder

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


@dataclass
class Checkpoint:
    """A model as transformers has it, and its directory."""

    judge: Any
    path: Path

    def load(self, quantization: str = "none") -> "Runner":
        config = ModelConfig.from_dir(self.path)
        decoder = load_decoder(config, self.path, "float32", quantization=quantization)
        return Runner(config, decoder)

    def log_probs(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.judge(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        out = self.judge.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        new: list[int] = out[0, len(token_ids) :].tolist()
        return new


@dataclass
class Runner:
    """A decoder and how to lay a cache out for it."""

    config: ModelConfig
    decoder: Decoder

    def cache(self, num_blocks: int, block_size: int, fill: float = float("nan")) -> torch.Tensor:
        # What nobody has written yet must never be read: it is NaN.
        c = self.config
        return torch.full(
            (num_blocks, c.num_layers, 2, c.num_kv_heads, block_size, c.head_dim), fill
        )

    def step(self, rows: list[Any], cache: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.forward(ModelInput.from_rows(rows, cache.shape[4]), cache)
        return logits.log_softmax(-1)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def write_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Checkpoint]:
    transformers = pytest.importorskip("transformers")

    def write(
        family: str = "Llama",
        config_class: str | None = None,
        model_class: str | None = None,
        max_shard: str = "1GB",
        **overrides: Any,
    ) -> Checkpoint:
        make_config = getattr(transformers, config_class or f"{family}Config")
        config = make_config(**{**TINY, **overrides})
        torch.manual_seed(0)
        make_model = getattr(transformers, model_class or f"{family}ForCausalLM")
        # Without dropout: some families train with it unless told otherwise.
        model = make_model(config).float().eval()
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            # Norms stay near one; matrices are large enough for attention to be picky.
            parameter.data = noise * 0.15 if parameter.dim() > 1 else parameter.data + noise * 0.1
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path, max_shard_size=max_shard)
        return Checkpoint(model, path)

    return write


@pytest.fixture(params=["native", "torch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise that holds with the kernels and without them."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", False)
    elif not native.available:
        pytest.skip("the kernels are not built")


@pytest.fixture(scope="session")
def llama(write_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return write_checkpoint()
