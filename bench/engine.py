"""How fast is our engine? Against one peer at a time: same model, tokens, threads and dtype."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.engines.case import NEW_TOKENS, Case, Prefill, prompts
from bench.engines.limits import Hardware, ModelCost
from bench.engines.node import NodeEngine
from bench.engines.roster import Peer, Places, find
from bench.engines.side import ChildSide, Side
from bench.machine import Machine
from bench.report import Comparison, Comparisons, Report
from bench.rounds import Rounds, take_turns
from splitserve.core.config import EngineConfig
from splitserve.model.config import ModelConfig, resolve_dtype

WARM_UP_ROUND = -1
WARM_UP_TOKENS = 2


@dataclass(frozen=True, slots=True)
class EngineQuestion:
    """What is asked.

    Attributes:
        model: The model's directory.
        dtype: Of weights and KV, on both sides.
        quantization: Of our side's weights.
        threads: Compute threads of either side.
        rounds: How often both sides take their turn.
        cases: What is measured.
        peer: One of `roster.PEERS`.
        places: Where peers are found.
    """

    model: Path
    dtype: str
    quantization: str
    threads: int
    rounds: int
    cases: Sequence[Case]
    peer: str
    places: Places

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV a side holds at once, at most."""
        return max(case.batch * case.length for case in self.cases)


async def measure(question: EngineQuestion) -> Report:
    """Answers the question for one peer.

    Raises:
        Skipped: It is not here.
    """
    peer = find(question.peer, question.places)
    machine = Machine.here("torch")
    config = ModelConfig.from_dir(question.model)
    question = replace(question, dtype=resolve_dtype(question.dtype, config))
    hardware = Hardware.measure(question.dtype, question.threads)
    rounds, versions = await _take_turns(question, peer, config)
    hardware = hardware.best(Hardware.measure(question.dtype, question.threads))
    cost = ModelCost.of(question.model, config, question.dtype, question.quantization)
    comparisons = [
        Comparison(
            case.name, "tokens/s", figures, peer.expected(case), limit=cost.rate(case, hardware)
        )
        for case, figures in zip(question.cases, rounds, strict=True)
    ]
    suffix = "" if question.quantization == "none" else f"-{question.quantization}"
    return Report(
        name=f"engine-{question.peer}{suffix}",
        title=f"one worker as a node drives it, beside {peer.name}",
        machine=replace(machine, versions=machine.versions | versions),
        settings={
            "model": config.name,
            "dtype": question.dtype,
            "quantization": question.quantization,
            "threads": question.threads,
            "rounds": question.rounds,
            "decoded": f"{NEW_TOKENS} tokens each",
        },
        findings=Comparisons(peer.name, comparisons),
        notes={
            "hardware": str(hardware),
            "of limit": "decode: our weights and KV of a step once through memory; prefill: all "
            "its operations at the matrix products' rate",
        },
    )


async def _take_turns(
    question: EngineQuestion, peer: Peer, config: ModelConfig
) -> tuple[list[Rounds], dict[str, str]]:
    """All cases' figures, and the peer's versions."""
    arguments = (question.model, question.dtype, question.threads)
    with peer.start(*arguments, question.kv_tokens) as child:
        other = ChildSide(child)
        versions = other.versions()  # It has loaded, and is stopped while we do.
        async with NodeEngine.open(_engine_config(question)) as engine:
            figures = [
                await _measure(case, engine, other, config.vocab_size, question.rounds)
                for case in question.cases
            ]
    return figures, versions


def _engine_config(question: EngineQuestion) -> EngineConfig:
    size = EngineConfig.block_size
    blocks = max(case.batch * -(-case.length // size) for case in question.cases)
    return EngineConfig(
        question.model,
        question.dtype,
        question.quantization,
        num_blocks=blocks,
        threads=question.threads,
    )


async def _measure(case: Case, ours: Side, peer: Side, vocab_size: int, rounds: int) -> Rounds:
    async def prefill(side: Side, number: int) -> float:
        # Other tokens every round: nobody can have them cached.
        [prompt] = prompts(number, 1, case.length - 1, vocab_size)
        return len(prompt) / await side.prefill(prompt)

    async def decode(side: Side, _: int) -> float:
        return case.batch * NEW_TOKENS / await side.decode(NEW_TOKENS)

    # Once unmeasured: memory is touched, kernels are chosen.
    if isinstance(case, Prefill):
        for side in (ours, peer):
            await prefill(side, WARM_UP_ROUND)
        return await take_turns(partial(prefill, ours), partial(prefill, peer), rounds)
    held = prompts(0, case.batch, case.context, vocab_size)
    for side in (ours, peer):
        await side.hold(held, NEW_TOKENS)
        await side.decode(WARM_UP_TOKENS)
    return await take_turns(partial(decode, ours), partial(decode, peer), rounds)
