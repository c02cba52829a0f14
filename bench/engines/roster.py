"""Who our engine is compared with: where each peer is found and what is expected of it."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.child import Child
from bench.engines.case import Case, Prefill
from bench.report import Skipped

PEERS = ("transformers", "vllm", "llama")

HOW_TO = "bench/README.md says how to get it"


@dataclass(frozen=True, slots=True)
class Places:
    """Where peers are that are not part of our environment; None where there is none.

    Attributes:
        vllm_python: The Python of an environment that has vLLM.
        llama_program: What `llama.cpp` was compiled to.
        llama_gguf: The model as llama.cpp reads it.
    """

    vllm_python: Path | None = None
    llama_program: Path | None = None
    llama_gguf: Path | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that is here.

    Attributes:
        name: For people.
        launcher: What runs its program; see `Child`.
        program: Its module, or what it was compiled to.
        weights: What it loads; None for the model's directory.
        prefill_ratio: Least ratio of ours to its prefill, if there is one.
        decode_ratios: Of decode, by batch and context.
    """

    name: str
    launcher: tuple[str, ...]
    program: str
    weights: Path | None
    prefill_ratio: float | None
    decode_ratios: Mapping[tuple[int, int], float]

    def start(self, model: Path, dtype: str, threads: int, kv_tokens: int) -> Child:
        """Starts it with room for the KV of so many tokens."""
        return Child(
            self.program,
            str(self.weights or model),
            dtype,
            str(threads),
            str(kv_tokens),
            threads=threads,
            launcher=self.launcher,
        )

    def expected(self, case: Case) -> float | None:
        """Least ratio of ours to its figure; None where nothing is expected."""
        if isinstance(case, Prefill):
            return self.prefill_ratio
        return self.decode_ratios.get((case.batch, case.context))


def find(name: str, places: Places) -> Peer:
    """One of `PEERS`.

    Raises:
        Skipped: It is not here; says what is missing.
    """
    return {"transformers": _transformers, "vllm": _vllm, "llama": _llama}[name](places)


def _transformers(places: Places) -> Peer:
    del places  # It is found where we are.
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed: pip install 'splitserve[import]'")
    return Peer(
        name="transformers",
        launcher=(sys.executable, "-m"),
        program="bench.engines.transformers",
        weights=None,
        prefill_ratio=0.9,
        decode_ratios={(1, 256): 1.5, (4, 256): 1.5, (16, 256): 2.5},
    )


def _vllm(places: Places) -> Peer:
    if places.vllm_python is None:
        raise Skipped(f"no vLLM: --vllm-python names none; {HOW_TO}")
    return Peer(
        name="vLLM",
        launcher=(str(places.vllm_python.absolute()), "-m"),
        program="bench.engines.vllm",
        weights=None,
        prefill_ratio=1.05,
        decode_ratios={(batch, context): 1.1 for batch in (4, 16, 64) for context in (256, 1024)},
    )


def _llama(places: Places) -> Peer:
    if places.llama_program is None or places.llama_gguf is None:
        raise Skipped(f"no llama.cpp: --llama-program and --llama-gguf name none; {HOW_TO}")
    return Peer(
        name="llama.cpp",
        launcher=(),
        program=str(places.llama_program.absolute()),
        weights=places.llama_gguf,
        prefill_ratio=None,
        decode_ratios={(1, 256): 1.0, (1, 1024): 1.0},
    )
