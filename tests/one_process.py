"""The judge of prefill + decode: the same model and sampler in one process, one at a time."""

from dataclasses import dataclass
from pathlib import Path

import torch

from splitserve.core.request import FinishReason, Request, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import SampleSpec
from splitserve.engine.sampler import sample
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import ModelInput
from splitserve.model.loader import load_decoder

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason


class OneProcess:
    """Computes each prompt whole and each token alone: no chunks, no batch, no hand-over."""

    def __init__(
        self,
        model: Path,
        *,
        dummy_seed: int | None = 0,
        dtype: str = "float32",
        quantization: str = "none",
    ) -> None:
        torch.set_num_threads(1)
        self.config = ModelConfig.from_dir(model)
        self._decoder = load_decoder(
            self.config, model, dtype, dummy_seed=dummy_seed, quantization=quantization
        )
        self._dtype = getattr(torch, dtype)

    def generate(self, token_ids: list[int], sampling: SamplingParams) -> Answer:
        request = Request("judge", list(token_ids), len(token_ids), sampling, "judge")
        config = self.config
        blocks = -(-request.max_length // BLOCK_SIZE)
        cache = torch.zeros(
            blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim,
            dtype=self._dtype,
        )  # fmt: skip
        logprobs: list[TokenLogprob] = []
        while True:
            fresh = request.token_ids[request.computed :]
            rows = [(fresh, request.computed, list(range(blocks)), True)]
            logits = self._decoder.forward(ModelInput.from_rows(rows, BLOCK_SIZE), cache)
            [token] = sample(logits, SampleSpec.of(request))
            request.computed = len(request.token_ids)
            logprobs.append(token)
            reason = request.append(token.token_id, config.eos_token_ids)
            if reason is not None:
                return Answer(request.token_ids[request.prompt_length :], logprobs, reason)
