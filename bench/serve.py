"""How many users are served well? The same open-loop load on our router and on a peer's server."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.machine import Machine, available_cores
from bench.report import RESULTS_DIR, Report, Skipped
from bench.serving.curves import Curves, Point
from bench.serving.load import drive
from bench.serving.objectives import Objectives
from bench.serving.router_target import RouterTarget
from bench.serving.target import Target
from bench.serving.traces import load_trace
from bench.serving.workload import Arrivals, PlannedRequest, Scaling, Workload, plan
from splitserve.local import LocalCluster
from splitserve.model.config import ModelConfig

OURS = "splitserve"
PEER = "peer"

INSTALL_HINT = "pip install 'splitserve[bench]'"

WARM_UP_PROMPT_TOKENS = (32, 256)
WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ServeQuestion:
    """What is asked.

    Attributes:
        model: The model's directory.
        dtype: Of our nodes.
        trace: Name or file of the trace.
        arrivals: When requests come.
        rates: Requests a second, one measurement each.
        duration_s: Of each measurement.
        objectives: What is expected of every request.
        scaling: How the trace is made to fit.
        seed: Chooses the part of the trace, the drawn arrivals and the prompts.
        router: Address of a router that runs; empty starts a cluster of one prefill and one
            decode node, which share the cores.
        peer_url: Of a peer's API, up to and with ``/v1``; empty measures ours alone.
        peer_command: Starts the peer; empty if it runs.
    """

    model: Path
    dtype: str
    trace: str
    arrivals: Arrivals
    rates: Sequence[float]
    duration_s: float
    objectives: Objectives
    scaling: Scaling
    seed: int
    router: str
    peer_url: str
    peer_command: str


async def measure(question: ServeQuestion) -> Report:
    """Answers the question, one side after the other.

    Raises:
        Skipped: The HTTP client is not installed.
    """
    if question.peer_url and importlib.util.find_spec("httpx2") is None:
        raise Skipped(f"a peer is asked over HTTP: {INSTALL_HINT}")
    machine = Machine.here("grpcio", "torch")
    config = ModelConfig.from_dir(question.model)
    workloads = _workloads(question, config.vocab_size)
    curves = Curves(
        {name: await _measure_side(name, question, workloads) for name in _sides(question)}
    )
    name = f"serve-{Path(question.trace).stem}"
    plots = _plot(curves, question, name)
    return Report(
        name=name,
        title=f"requests of the {question.trace} trace in open loop",
        machine=machine,
        settings=_settings(question, config.name),
        findings=curves,
        notes=_notes(question, curves, workloads) | {"plots": plots},
    )


def _sides(question: ServeQuestion) -> list[str]:
    return [OURS, PEER] if question.peer_url else [OURS]


def _workloads(question: ServeQuestion, vocab_size: int) -> list[Workload]:
    trace = load_trace(question.trace)
    return [
        plan(
            trace,
            question.arrivals,
            rate,
            question.duration_s,
            question.scaling,
            vocab_size,
            question.seed,
        )
        for rate in question.rates
    ]


async def _measure_side(
    name: str, question: ServeQuestion, workloads: Sequence[Workload]
) -> list[Point]:
    points = []
    with _serving(name, question) as target:
        async with target:
            await drive(target, _warm_up())
            for workload in workloads:
                answers = await drive(target, workload.requests)
                points.append(Point(workload.rate, answers, question.objectives))
    return points


@contextmanager
def _serving(name: str, question: ServeQuestion) -> Iterator[Target]:
    """A side that serves, started here unless it runs already."""
    if name == PEER:
        with _peer(question) as target:
            yield target
    elif question.router:
        yield RouterTarget(question.router)
    else:
        options = {
            "threads": max(1, available_cores() // 2),
            "dtype": question.dtype,
            "log_level": "WARNING",
        }
        with LocalCluster(
            question.model, prefill_options=options, decode_options=options
        ) as cluster:
            yield RouterTarget(cluster.address)


@contextmanager
def _peer(question: ServeQuestion) -> Iterator[Target]:
    # Only who compares needs an HTTP client.
    from bench.serving.openai_target import OpenAiTarget
    from bench.serving.peer import running

    with ExitStack() as stack:
        if question.peer_command:
            stack.enter_context(running(question.peer_command, question.peer_url))
        yield OpenAiTarget(question.peer_url)


def _warm_up() -> list[PlannedRequest]:
    return [
        PlannedRequest(0.0, tuple(range(length)), WARM_UP_OUTPUT_TOKENS)
        for length in WARM_UP_PROMPT_TOKENS
    ]


def _settings(question: ServeQuestion, model: str) -> dict[str, object]:
    return {
        "model": model,
        "arrivals": question.arrivals,
        "duration": f"{question.duration_s:g} s",
        "seed": question.seed,
        "objectives": str(question.objectives),
        "peer": question.peer_command or question.peer_url or "none",
    }


def _notes(
    question: ServeQuestion, curves: Curves, workloads: Sequence[Workload]
) -> dict[str, str]:
    requests = [request for workload in workloads for request in workload.requests]
    cut = sum(workload.cut for workload in workloads)
    mean_prompt = sum(len(request.prompt) for request in requests) / len(requests)
    mean_output = sum(request.output_tokens for request in requests) / len(requests)
    notes = {
        "lengths": f"{question.scaling.lengths:g} of the trace's: {mean_prompt:.0f} prompt and "
        f"{mean_output:.0f} output tokens in the mean; {cut} of {len(requests)} prompts cut",
        "generator": "latest request sent "
        f"{max(p.late_s for points in curves.sides.values() for p in points) * 1e3:.1f} ms "
        "after it was due",
    }
    if question.arrivals == "trace":
        factors = ", ".join(f"{one.time_factor:.3g}" for one in workloads)
        notes["time"] = f"stretched to {factors} of the trace's"
    goodputs = [curves.goodput(name) for name in curves.sides]
    notes["goodput at 90 %"] = ", ".join(
        f"{name} {rate:.2f} requests/s" for name, rate in zip(curves.sides, goodputs, strict=True)
    )
    for name, points in curves.sides.items():
        if errors := sorted({error for point in points for error in point.failed}):
            notes[f"failures of {name}"] = "; ".join(errors[:3])
    return notes


def _plot(curves: Curves, question: ServeQuestion, name: str) -> str:
    """Draws all plots; returns their names, or why there are none."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"skipped: {INSTALL_HINT}"
    from bench.serving.plots import plot_attainment, plot_timelines

    title = f"{question.trace}: {question.objectives}"
    files = plot_attainment(curves, title, RESULTS_DIR / f"{name}-attainment")
    for number, rate in enumerate(question.rates):
        points = {side: points[number] for side, points in curves.sides.items()}
        files += plot_timelines(points, RESULTS_DIR / f"{name}-timeline-{rate:g}")
    return ", ".join(file.name for file in files)
