"""The engine question's peer: transformers' own ``generate``, in a process of its own."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.child import serve


class TokenClock(transformers.StoppingCriteria):
    """Notes when each token is there, and stops nothing.

    Attributes:
        times_s: One per token.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Called by ``generate`` behind every token."""
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Generator:
    """A model, greedy and without an end of sequence.

    Args:
        model: Its directory.
        dtype: Name of the data type.
    """

    def __init__(self, model: str, dtype: str) -> None:
        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        settings: Any = transformers.GenerationConfig
        self._model.generation_config = settings(do_sample=False, pad_token_id=0)

    def versions(self) -> dict[str, str]:
        """Of what is measured."""
        return {"transformers": transformers.__version__}

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""
        clock = TokenClock()
        begin = time.perf_counter()
        self._generate(torch.tensor([prompt]), 1, clock)
        return clock.times_s[0] - begin

    def hold(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Computes prompts that `decode` continues; ``count`` is the other side's to know."""
        self._length = len(prompts[0])
        made = self._generate(torch.tensor(prompts), 1, TokenClock())
        self._tokens, self._cache = made.sequences, made.past_key_values

    def decode(self, count: int) -> float:
        """Seconds from one of a held prompt's tokens to the ``count`` after it, in one batch."""
        if added := self._cache.get_seq_length() - self._length:
            self._cache.crop(-added)
        clock = TokenClock()
        # The token more is the one from which time counts: what comes before the loop is not
        # the loop's.
        self._generate(self._tokens, count + 1, clock, past_key_values=self._cache)
        return clock.times_s[-1] - clock.times_s[0]

    def _generate(self, ids: Tensor, count: int, clock: TokenClock, **cache: Any) -> Any:
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            return_dict_in_generate=True,
            **cache,
        )
        assert len(clock.times_s) == count, "nothing ends early"
        return made


async def main(model: str, dtype: str, threads: int) -> None:
    """Loads, then measures what it is asked to."""
    torch.set_num_threads(threads)
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generator = Generator(model, dtype)

    async def answer(what: str, **arguments: Any) -> Any:
        return getattr(generator, what)(**arguments)

    await serve(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
