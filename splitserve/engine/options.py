"""The command line that both kinds of node share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from splitserve.core.config import (
    DEVICES,
    DTYPES,
    QUANTIZATIONS,
    EngineConfig,
    NodeConfig,
    default_threads,
)
from splitserve.core.launch import Launch
from splitserve.core.node import NodeKind
from splitserve.core.options import LOG_LEVELS, Command, option
from splitserve.core.parallel import ParallelConfig


class LayerCounts(click.ParamType[tuple[int, ...]]):
    """Numbers between commas."""

    name = "counts"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """``"8,7"`` to ``(8, 7)``."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(",")) if value else ()
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers like 8,8,7,7", param, ctx)


def node_options(kind: NodeKind, port: int) -> Callable[[Command], Command]:
    """Every option both kinds of node have; `node_config` takes what they parse to."""

    def opt(name: str, text: str, **attributes: Any) -> Callable[[Command], Command]:
        return option(f"{kind.label}-node", name, help=text, **attributes)

    options = [
        opt("--model", "Directory of the model in the Hugging Face format.", required=True,
            type=Path),
        opt("--dtype", "Data type of weights and KV; auto: the fastest of this processor.",
            default=EngineConfig.dtype, type=click.Choice(DTYPES)),
        opt("--quantization", "Bits of linear layers' weights; int8: smaller, and decodes faster.",
            default=EngineConfig.quantization, type=click.Choice(QUANTIZATIONS)),
        opt("--device", "Where the model runs.", default=EngineConfig.device,
            type=click.Choice(DEVICES)),
        opt("--use-dummy-weights", "Random weights, the same on every node for one seed.",
            is_flag=True),
        opt("--seed", "Seed of dummy weights.", default=EngineConfig.seed),
        opt("--block-size", "Tokens in a KV block.", default=EngineConfig.block_size),
        opt("--num-blocks", "KV blocks.", type=int, show_default="for a few long requests"),
        opt("--max-model-len", "Most tokens of prompt and answer together.", type=int,
            show_default="the model's"),
        opt("--tensor-parallel-size", "Ranks that share each layer.",
            default=ParallelConfig.tensor_parallel_size),
        opt("--pipeline-parallel-size", "Stages that layers are shared out to.",
            default=ParallelConfig.pipeline_parallel_size),
        opt("--pipeline-layers", "Layers of each stage, for example 8,8,7,7.", type=LayerCounts(),
            default="", show_default="shared out evenly"),
        opt("--launcher", "Who starts the ranks: the node, or torchrun, on any hosts.",
            default="spawn", type=click.Choice(("spawn", "torchrun"))),
        opt("--threads", "Compute threads of each rank.", type=int,
            show_default="half of the processors, shared by the ranks"),
        opt("--max-batch-size", "Most requests in a step.", default=NodeConfig.max_batch_size),
        opt("--max-queued-requests", "Most requests that wait on this node.",
            default=NodeConfig.max_queued_requests),
        opt("--no-prefix-cache", "Forget the KV of a request as soon as it has ended.",
            is_flag=True),
        opt("--listen", "host:port to serve on; port 0 takes a free one.",
            default=f"127.0.0.1:{port}"),
        opt("--advertise", "host:port that the router and peers dial.", default="",
            show_default="the address served on"),
        opt("--router", "host:port of the router.", default=NodeConfig.router),
        opt("--join-timeout", "Seconds to look for the router before giving up.", type=float,
            default=NodeConfig.join_timeout_s),
        opt("--drain-timeout", "Seconds that running requests may take after SIGTERM.",
            type=float, default=NodeConfig.drain_timeout_s),
        opt("--trace-dir", "Directory for a trace of every rank's steps (Chrome's format).",
            type=Path),
        opt("--log-level", "Least severe messages logged.", default="INFO",
            type=click.Choice(LOG_LEVELS)),
    ]  # fmt: skip

    def add(command: Command) -> Command:
        for decorate in reversed(options):
            command = decorate(command)
        return command

    return add


def node_config(
    kind: NodeKind,
    *,
    model: Path,
    dtype: str,
    quantization: str,
    device: str,
    use_dummy_weights: bool,
    seed: int,
    block_size: int,
    num_blocks: int | None,
    max_model_len: int | None,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    pipeline_layers: tuple[int, ...],
    launcher: str,
    threads: int | None,
    trace_dir: Path | None,
    no_prefix_cache: bool,
    join_timeout: float,
    drain_timeout: float,
    **limits: Any,
) -> NodeConfig:
    """The configuration that the shared options, and a kind's own, stand for.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """
    parallel = ParallelConfig(tensor_parallel_size, pipeline_parallel_size, pipeline_layers)
    launch = Launch.from_environment(os.environ) if launcher == "torchrun" else None
    local_ranks = parallel.num_ranks if launch is None else launch.local_ranks
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        quantization=quantization,
        device=device,
        seed=seed,
        use_dummy_weights=use_dummy_weights,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        threads=default_threads(local_ranks) if threads is None else threads,
        parallel=parallel,
        trace_dir=trace_dir,
        launch=launch,
    )
    return NodeConfig(
        kind,
        engine,
        prefix_cache=not no_prefix_cache,
        join_timeout_s=join_timeout,
        drain_timeout_s=drain_timeout,
        **limits,
    )
