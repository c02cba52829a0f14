"""What a daemon is told at start, and the name of every limit."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from splitserve.core.errors import invalid
from splitserve.core.launch import Launch
from splitserve.core.node import NodeKind
from splitserve.core.parallel import ONE_RANK, ParallelConfig

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest gRPC message any daemon takes."""

MAX_REQUEST_ID_CHARS = 128
MAX_CHAT_MESSAGES = 4096

MAX_FINISHED_LIFETIMES = 1024
"""Finished requests whose lifetime the router still knows."""

PING_INTERVAL_S = 1.0
"""How often a router measures a node's clock and renews its leases."""

RPC_TIMEOUT_S = 10.0
"""Limit of one unary call between daemons."""

NODE_STATUS_TIMEOUT_S = 1.0
"""How long a node may take to say its status before it is shown as not serving."""

MAX_UNANSWERED_PINGS = 5
"""Pings a node may leave unanswered before its router takes it for lost."""

MAX_PENDING_COMMANDS = 16_384
"""Commands that wait for a node to read them; a node further behind is lost."""

CLOCK_PINGS = 3
"""Pings that measure a node's clock before it is given work."""

CLOCK_SAMPLES = 32
"""Round trips remembered; the shortest of them says how far a node's clock is off."""

OVERLOAD_PAUSE_S = 0.2
"""How long after a node's refusal it is asked whether it takes one more."""

MAX_QUEUE_WAIT_S = 600.0
"""Longest a request waits in the router for a prefill node whose queue has room."""

CLIENT_STALL_TIMEOUT_S = 60.0
"""How long a client may take to read the rest of an answer that is complete."""

MAX_INLINE_TEXT_CHARS = 4096
"""Longest text that is tokenised on the event loop; longer ones go to a thread."""

JOIN_RETRY_S = (0.2, 5.0)
"""First and longest pause between a node's attempts to join."""

WORKER_START_TIMEOUT_S = 300.0
"""Limit for a worker to load its model and report."""

WORKER_STOP_TIMEOUT_S = 5.0
"""Limit for a worker to leave by itself before it is killed."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("cpu",)


@dataclass(frozen=True)
class EngineConfig:
    """What a node's workers need to stand up.

    Attributes:
        model: Directory in the Hugging Face format.
        dtype: Data type of weights, activations and KV; ``auto`` takes the fastest this
            processor has among bfloat16 and float32.
        quantization: How linear layers keep their weights, in any data type; ``int8``: 8 bits and a
            scale for each output.
        device: Where the model runs.
        seed: Seed of dummy weights.
        use_dummy_weights: Random weights from the config, the same on every node for one seed.
        block_size: Tokens in a KV block.
        num_blocks: KV blocks; None takes what a few long requests need.
        max_model_len: Most tokens of prompt and answer together; None takes the model's.
        threads: Compute threads of each rank.
        parallel: How many ranks there are, and how they share the model.
        trace_dir: Where each rank writes when it computed which step; None for nowhere.
        launch: How a launcher started this process as one of the ranks; None if the node starts
            them all.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """

    model: Path
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "cpu"
    seed: int = 0
    use_dummy_weights: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    threads: int = 1
    parallel: ParallelConfig = ONE_RANK
    trace_dir: Path | None = None
    launch: Launch | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise invalid("dtype", self.dtype, ", ".join(DTYPES))
        if self.quantization not in QUANTIZATIONS:
            raise invalid("quantization", self.quantization, ", ".join(QUANTIZATIONS))
        if self.device not in DEVICES:
            raise invalid("device", self.device, ", ".join(DEVICES))
        _at_least("block_size", self.block_size, 1)
        _at_least("threads", self.threads, 1)
        _at_least("seed", self.seed, 0)
        if self.num_blocks is not None:
            _at_least("num_blocks", self.num_blocks, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.launch is not None and self.launch.num_ranks != self.parallel.num_ranks:
            raise invalid(
                "WORLD_SIZE",
                self.launch.num_ranks,
                f"tensor_parallel_size * pipeline_parallel_size, {self.parallel.num_ranks}",
            )


@dataclass(frozen=True)
class NodeConfig:
    """What a node daemon is told at start.

    Attributes:
        kind: Which half of the work it does.
        engine: What its workers need.
        listen: ``host:port`` to serve on; port 0 takes a free one.
        advertise: ``host:port`` the router and peers dial; empty takes the bound address.
        router: ``host:port`` of the router to join.
        max_batch_size: Most requests in a step.
        max_tokens_per_batch: Most prompt tokens in a step (prefill node); a cancelled prompt is
            computed to the end of its step, so on a CPU this is kept small.
        max_queued_requests: Most requests that wait on this node.
        max_concurrent_pulls: Most pulls at once (decode node).
        prefix_cache: Whether the KV of earlier requests is kept and found again.
        lease_ttl_s: Life of a lease that its router no longer renews (prefill node).
        join_timeout_s: How long to look for the router before giving up.
        drain_timeout_s: How long running requests may take to finish after SIGTERM.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """

    kind: NodeKind
    engine: EngineConfig
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    router: str = "127.0.0.1:50050"
    max_batch_size: int = 64
    max_tokens_per_batch: int = 512
    max_queued_requests: int = 256
    max_concurrent_pulls: int = 2
    prefix_cache: bool = True
    lease_ttl_s: float = 60.0
    join_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_address("listen", self.listen)
        check_address("router", self.router, dialable=True)
        if self.advertise:
            check_address("advertise", self.advertise, dialable=True)
        for field in (
            "max_batch_size",
            "max_tokens_per_batch",
            "max_queued_requests",
            "max_concurrent_pulls",
        ):
            _at_least(field, getattr(self, field), 1)
        for field in ("lease_ttl_s", "join_timeout_s", "drain_timeout_s"):
            _seconds(field, getattr(self, field))


@dataclass(frozen=True)
class RouterConfig:
    """What the router daemon is told at start.

    Attributes:
        model: Directory with ``config.json`` and the tokenizer; weights are not read.
        tokenizer: Directory of the tokenizer if it is another one.
        listen: ``host:port`` to serve on; port 0 takes a free one.
        max_queued_requests: Most requests without a token; more are refused.
        max_retries: How often a request is started again after a failure.
        overlapped_pull: Whether decode nodes may pull what there is of a prompt while the rest of
            it is computed.
        handover_timeout_s: How long a prefilled request waits for a decode node to take it.
        drain_timeout_s: How long running requests may take to finish after SIGTERM.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """

    model: Path
    tokenizer: Path | None = None
    listen: str = "127.0.0.1:50050"
    max_queued_requests: int = 1024
    max_retries: int = 3
    overlapped_pull: bool = True
    handover_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_address("listen", self.listen)
        _at_least("max_queued_requests", self.max_queued_requests, 1)
        _at_least("max_retries", self.max_retries, 0)
        for field in ("handover_timeout_s", "drain_timeout_s"):
            _seconds(field, getattr(self, field))


def default_threads(local_ranks: int) -> int:
    """Half of the processors this process may use, shared by the ranks of this host.

    A prefill and a decode node share a machine unless somebody says otherwise; together they
    then fill it and do not fight for cores.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2 // local_ranks)


def check_address(field: str, value: str, *, dialable: bool = False) -> None:
    """Raises `InvalidArgumentError` unless the value is ``host:port``."""
    host, colon, port = value.rpartition(":")
    low = 1 if dialable else 0
    if not host or not colon or not port.isdecimal() or not low <= int(port) <= 65535:
        raise invalid(field, value, f"host:port with a port from {low} to 65535")


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise invalid(field, value, f"at least {low}")


def _seconds(field: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise invalid(field, value, "a finite number of seconds, at least 0")
