"""``python -m bench [engine] [pull] [router] [quality] [serve]``, each with its own options."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from bench.child import ChildError
from bench.engine import EngineQuestion
from bench.engines.case import MAX_BATCH, Case, Decode, Prefill
from bench.engines.roster import PEERS, Places
from bench.machine import Disturbance, available_cores
from bench.report import Report, Skipped, console
from bench.serve import ServeQuestion
from bench.serving.objectives import Objectives
from bench.serving.target import TargetError
from bench.serving.traces import DRAWN, RECORDED
from bench.serving.workload import ARRIVALS, Arrivals, Scaling
from splitserve.core.config import DTYPES, QUANTIZATIONS
from splitserve.core.errors import SplitserveError
from splitserve.model.importer import default_model


def _model_or_default(_: click.Context, __: click.Parameter, model: Path | None) -> Path:
    try:
        return model or default_model()
    except SplitserveError as error:
        raise click.ClickException(str(error)) from error


model_option = click.option(
    "--model",
    type=Path,
    show_default="SmolLM2-135M-Instruct",
    callback=_model_or_default,
    help="Its directory.",
)
dtype_option = click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
threads_option = click.option(
    "--threads",
    default=available_cores,
    show_default="all cores",
    type=click.IntRange(min=1),
    help="Compute threads of either side.",
)
program_path = click.Path(
    # A virtual environment's Python is a link that has to stay one.
    exists=True,
    dir_okay=False,
    executable=True,
    path_type=Path,
)
rounds_option = click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="How often both sides take their turn; medians count.",
)


@click.group(chain=True, invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measures splitserve beside others, and writes bench/results/NAME.json.

    Without a question: engine, pull and router with their defaults.
    """
    # What we started is ended by `finally` blocks, which a plain SIGTERM would skip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if context.invoked_subcommand is None:
        for question in (engine, pull, router):
            context.invoke(question)


@main.command()
@model_option
@dtype_option
@click.option(
    "--quantization",
    default="none",
    show_default=True,
    type=click.Choice(QUANTIZATIONS),
    help="Of our side's weights.",
)
@threads_option
@rounds_option
@click.option(
    "--peer",
    "peers",
    multiple=True,
    default=PEERS,
    show_default="all that are here",
    type=click.Choice(PEERS),
    help="Whom to compare with; may be repeated.",
)
@click.option(
    "--prompt",
    "prompt_tokens",
    multiple=True,
    default=(128, 512, 2048),
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of a prompt whose prefill is measured.",
)
@click.option(
    "--batch",
    "batches",
    multiple=True,
    default=(1, 4, 16, 64),
    show_default=True,
    type=click.IntRange(min=1, max=MAX_BATCH),
    help="Sequences that are decoded at once.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    default=(256, 1024),
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens before those that are decoded.",
)
@click.option(
    "--vllm-python",
    type=program_path,
    envvar="SPLITSERVE_BENCH_VLLM_PYTHON",
    show_envvar=True,
    help="Python of an environment with vLLM.",
)
@click.option(
    "--llama-program",
    type=program_path,
    envvar="SPLITSERVE_BENCH_LLAMA_PROGRAM",
    show_envvar=True,
    help="What bench/engines/llama.cpp was compiled to.",
)
@click.option(
    "--llama-gguf",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    envvar="SPLITSERVE_BENCH_LLAMA_GGUF",
    show_envvar=True,
    help="The same model for llama.cpp.",
)
def engine(
    model: Path,
    dtype: str,
    quantization: str,
    threads: int,
    rounds: int,
    peers: tuple[str, ...],
    prompt_tokens: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    vllm_python: Path | None,
    llama_program: Path | None,
    llama_gguf: Path | None,
) -> None:
    """How fast is our engine, beside transformers, vLLM and llama.cpp?"""
    cases: list[Case] = [
        *(Prefill(tokens) for tokens in prompt_tokens),
        *(Decode(batch, context) for context in contexts for batch in batches),
    ]
    places = Places(vllm_python, llama_program, llama_gguf)
    for peer in dict.fromkeys(peers):
        question = EngineQuestion(model, dtype, quantization, threads, rounds, cases, peer, places)
        _answer("engine", question)


@main.command()
@model_option
@dtype_option
@rounds_option
def pull(model: Path, dtype: str, rounds: int) -> None:
    """How fast is a pull, beside memcpy?"""
    _answer("pull", model, dtype, rounds)


@main.command()
@model_option
@rounds_option
def router(model: Path, rounds: int) -> None:
    """What does the router cost, beside a bare gRPC hop?"""
    _answer("router", model, rounds)


@main.command()
@model_option
@threads_option
def quality(model: Path, threads: int) -> None:
    """What does rounding cost, in perplexity?"""
    _answer("quality", model, threads)


@main.command()
@model_option
@dtype_option
@click.option(
    "--trace",
    default="conversation",
    show_default=True,
    help=f"{', '.join((*RECORDED, *DRAWN))}, or a CSV file with the same columns.",
)
@click.option("--arrivals", default="poisson", show_default=True, type=click.Choice(ARRIVALS))
@click.option(
    "--request-rate",
    "rates",
    multiple=True,
    default=(0.5, 1.0, 2.0),
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a second; repeat it for a curve.",
)
@click.option(
    "--duration-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="How long requests come at each rate.",
)
@click.option("--ttft-ms", default=2000.0, show_default=True, help="Objective: to first token.")
@click.option("--tpot-ms", default=100.0, show_default=True, help="Objective: per output token.")
@click.option(
    "--length-scale",
    default=0.5,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Factor of the trace's prompt and output lengths.",
)
@click.option(
    "--max-tokens",
    default=4096,
    show_default=True,
    type=click.IntRange(min=3),
    help="Longest prompt and output together; longer prompts are cut.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--router", "router_address", default="", help="Address of one that runs.")
@click.option("--peer", "peer_url", default="", help="http://HOST:PORT/v1 of a server to compare.")
@click.option("--peer-command", default="", help="Starts the peer for its turn.")
def serve(
    model: Path,
    dtype: str,
    trace: str,
    arrivals: Arrivals,
    rates: tuple[float, ...],
    duration_s: float,
    ttft_ms: float,
    tpot_ms: float,
    length_scale: float,
    max_tokens: int,
    seed: int,
    router_address: str,
    peer_url: str,
    peer_command: str,
) -> None:
    """How many users are served well, beside an OpenAI-compatible server?"""
    if peer_command and not peer_url:
        raise click.UsageError("--peer-command needs --peer, the URL it will answer at")
    question = ServeQuestion(
        model,
        dtype,
        trace,
        arrivals,
        sorted(set(rates)),
        duration_s,
        Objectives(ttft_ms / 1e3, tpot_ms / 1e3),
        Scaling(length_scale, max_tokens),
        seed,
        router_address,
        peer_url,
        peer_command,
    )
    _answer("serve", question)


def _answer(name: str, *arguments: Any) -> None:
    """One question, from measuring to the file; one that cannot be asked here is skipped."""
    measure: Callable[..., Coroutine[Any, Any, Report]] = import_module(f"bench.{name}").measure
    output = console()
    others = Disturbance()
    try:
        report = asyncio.run(measure(*arguments))
    except Skipped as reason:
        output.print(f"\n{name}: skipped: {reason}")
        return
    except (ChildError, SplitserveError, TargetError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    report = replace(report, others=others.share)
    report.show(output)
    output.print(f"written: {report.write()}")


if __name__ == "__main__":
    main(prog_name="python -m bench")
