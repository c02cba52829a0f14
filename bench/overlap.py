"""How soon after its last chunk a prompt is decoded, with overlapped pull and without."""

import random
from pathlib import Path
from statistics import median

from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster
from splitserve.model.config import ModelConfig

PROMPT_TOKENS = 2048


def after_last_chunk_s(model: Path, rounds: int, *, overlapped: bool) -> float:
    """Median time from a prompt's last chunk to its request's place in the decode batch."""
    vocab_size = ModelConfig.from_dir(model).vocab_size
    source = random.Random(0)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    node = {"threads": 1, "log_level": "WARNING"}
    with (
        LocalCluster(
            model,
            router_options={"no_overlapped_pull": not overlapped, "log_level": "WARNING"},
            prefill_options=node,
            decode_options=node,
        ) as cluster,
        cluster.client() as client,
    ):
        seconds = []
        for _ in range(rounds):
            prompt = source.choices(range(vocab_size), k=PROMPT_TOKENS)
            answer = client.generate(token_ids=prompt, sampling=sampling).completion()
            at = {event.kind: event.time_ns for event in answer.lifetime.events}
            begin, end = LifetimeEventKind.PREFILL_END, LifetimeEventKind.DECODE_BEGIN
            seconds.append((at[end] - at[begin]) / 1e9)
    return median(seconds)
