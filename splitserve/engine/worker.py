"""The worker: one process per rank, which owns the model and a KV cache.

``python -m splitserve.engine.worker``, started by `splitserve.engine.spawn` or, far from its node,
by `splitserve.engine.join`. Steps come over one socket and run in the main thread; pulls come
over another and run beside them in a thread. A third thread does nothing but wait for the node's
end of a pipe to close: however the node ends, the worker goes at once, also in the middle of a
step. An error in a pull is that pull's; an error
anywhere else ends the process, since nobody can say what a half-done step has left.
"""

import argparse
import contextlib
import logging
import os
import socket
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from splitserve import native
from splitserve.core.errors import SplitserveError
from splitserve.core.logs import configure_logs
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import Batch, BatchRow, SampleSpec, StepOutput
from splitserve.engine.messages import BlockingChannel, Failure, Ready, Reply, Start
from splitserve.engine.ranks import Ranks
from splitserve.engine.sampler import sample
from splitserve.engine.trace import StepTrace
from splitserve.kv.cache import KVCache
from splitserve.kv.memory import remove, segment_name
from splitserve.model.decoder import Decoder, ModelInput
from splitserve.model.loader import load_decoder
from splitserve.model.size import weight_bytes
from splitserve.transfer.shm import TRANSPORT, ShmExporter, ShmImporter
from splitserve.transfer.transport import PullJob, PullResult

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 2.0
"""How often a model that takes long to load says how far it is."""

OTHERS_GRACE_S = 1.0
"""How long a rank whose step failed waits for its node to notice that another one is gone."""

PEER_CHECK_INTERVAL_S = 1.0
"""How often memory of peers that are gone is given back while no pulls come."""


class Worker:
    """One rank: its part of the model, its KV, and its side of transfers.

    Args:
        start: What to be.
        listener: The first rank's: the socket where ranks meet.

    Raises:
        SplitserveError: The model or the memory cannot be used; one clear sentence.
    """

    def __init__(self, start: Start, listener: socket.socket | None) -> None:
        shape = start.shape
        self._model = shape.model
        self._part = shape.parts[start.rank]
        self._ranks = Ranks(start.config.parallel, start.rank, start.host, start.port, listener)
        self._decoder = _load(start, self._ranks)
        name = segment_name(start.epoch, start.rank)
        self._cache = KVCache.create(name, shape.layouts[start.rank], shape.num_blocks)
        self._tensor = self._cache.tensor
        self._max_model_len = shape.max_model_len
        self._trace = StepTrace(_trace_path(start), start.rank)
        self._exporter = ShmExporter(self._cache)
        self._importer = ShmImporter(self._cache, start.rank)

    @property
    def samples(self) -> bool:
        """Whether this is the rank that samples, and replies to steps."""
        return self._part.is_last and self._part.tensor_rank == 0

    def warm_up(self) -> None:
        """Runs a prompt and a token, so that no request pays for what happens once.

        Writes to block 0, which is nobody's yet and is not read before it is written.
        """
        spec = SampleSpec(SamplingParams(seed=0), 0)
        count = min(self._cache.layout.block_size, self._max_model_len)
        prompt = BatchRow(("", 0), (0,) * count, 0, (0,), (spec,))
        token = BatchRow(("", 0), (0,), count - 1, (0,), (spec,))
        for row in (prompt, token):
            self.execute(Batch((row,)))

    def ready(self) -> Ready:
        """What this worker has become."""
        return Ready(self._exporter.export(), TRANSPORT, weight_bytes(self._decoder))

    def execute(self, batch: Batch) -> StepOutput | None:
        """Computes this rank's part of a step; None unless it is the rank that samples."""
        rows = [(row.token_ids, row.start, row.block_ids, bool(row.samples)) for row in batch.rows]
        model_input = ModelInput.from_rows(rows, self._cache.layout.block_size)
        hidden = None
        if not self._part.is_first:
            width, dtype = self._model.hidden_size, self._decoder.dtype
            hidden = self._ranks.receive(batch.num_tokens, width, dtype)
        with self._trace.step(batch):
            out = self._decoder.forward(model_input, self._tensor, hidden)
            output = _sampled(batch, out) if self.samples else None
        if not self._part.is_last:
            self._ranks.send(out)
        return output

    def pull(self, job: PullJob) -> PullResult:
        """Copies a ticket's KV into this rank's blocks, beside steps; see `KVImporter.pull`."""
        result = self._importer.pull(job)
        for source, target in job.copies:
            self._cache.raw[target] = self._cache.raw[source]
        return result

    def drop_dead_peers(self) -> None:
        """Gives back the memory of peers that are gone."""
        self._importer.drop_dead()

    def close(self) -> None:
        """Takes the KV's name away."""
        self._exporter.close()


def _sampled(batch: Batch, logits: Tensor) -> StepOutput:
    """Samples from one row of logits for each row of the batch that asks for it."""
    counts = [len(row.samples) for row in batch.rows if row.samples]
    if max(counts, default=0) > 1:
        logits = logits.repeat_interleave(torch.tensor(counts), dim=0)
    sampled = iter(sample(logits, [spec for row in batch.rows for spec in row.samples]))
    return StepOutput(tuple(tuple(islice(sampled, len(row.samples))) for row in batch.rows))


def _trace_path(start: Start) -> Path | None:
    folder = start.config.trace_dir
    return None if folder is None else folder / f"{start.epoch}-{start.rank}.json"


def _load(start: Start, ranks: Ranks) -> Decoder:
    config, shape = start.config, start.shape
    begin = said = time.monotonic()

    def progress(done: int, layers: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PROGRESS_INTERVAL_S:
            said = time.monotonic()
            log.info("loading the model", extra={"layers": f"{done}/{layers}"})

    decoder = load_decoder(
        shape.model,
        config.model,
        shape.dtype,
        part=shape.parts[start.rank],
        group=ranks.tensor,
        dummy_seed=config.seed if config.use_dummy_weights else None,
        quantization=config.quantization,
        progress=progress,
    )
    log.info(
        "model loaded",
        extra={
            "model": shape.model.name,
            "dtype": shape.dtype,
            "quantization": config.quantization,
            "kernels": native.description(),
            "seconds": f"{time.monotonic() - begin:.1f}",
        },
    )
    return decoder


def _serve_steps(worker: Worker, steps: BlockingChannel) -> None:
    """Until the node closes its end."""
    while (call := steps.receive()) is not None:
        try:
            output = worker.execute(call.work)
        except Exception as error:
            steps.send(Failure.of(error))
            raise
        if output is not None:
            steps.send(Reply(call.call_id, output))


def _serve_pulls(worker: Worker, pulls: BlockingChannel) -> None:
    """One at a time; those that wait do so in the socket."""
    while True:
        if not pulls.wait(PEER_CHECK_INTERVAL_S):
            worker.drop_dead_peers()
            continue
        call = pulls.receive()
        if call is None:
            return
        result: Any
        try:
            result = worker.pull(call.work)
        except Exception as error:
            result = Failure.of(error)
            expected = isinstance(error, SplitserveError)
            log.warning("a pull failed: %s", result.message, exc_info=not expected)
        pulls.send(Reply(call.call_id, result))


def _leave_with_node(death_fd: int, epoch: str, rank: int) -> None:
    """Blocks until the node's end of the pipe is closed, then ends this process."""
    with contextlib.suppress(OSError):  # A socket may break.
        os.read(death_fd, 1)
    remove(segment_name(epoch, rank))
    os._exit(1)


def _run(
    steps: BlockingChannel,
    pulls: BlockingChannel,
    death_fd: int,
    listener: socket.socket | None,
) -> int:
    """The worker's life; returns its exit code."""
    start = steps.receive()
    if not isinstance(start, Start):
        return 1
    threading.Thread(
        target=_leave_with_node, args=(death_fd, start.epoch, start.rank), daemon=True
    ).start()
    torch.set_num_threads(start.config.threads)
    torch.set_num_interop_threads(1)
    try:
        worker = Worker(start, listener)
        worker.warm_up()
    except Exception as error:
        if not isinstance(error, SplitserveError):
            log.exception("the worker could not start")
        remove(segment_name(start.epoch, start.rank))
        steps.send(Failure.of(error))
        return 1
    steps.send(worker.ready())
    threading.Thread(target=_serve_pulls, args=(worker, pulls), daemon=True).start()
    try:
        _serve_steps(worker, steps)
    except Exception:
        if start.config.parallel.num_ranks > 1:
            # If another rank has died, the node ends this one meanwhile, and has said why.
            time.sleep(OTHERS_GRACE_S)
        log.exception("a step failed")
        return 1
    finally:
        worker.close()
    return 0


def main() -> NoReturn:
    """Entry point of the process; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="splitserve.engine.worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--steps-fd", type=int, required=True)
    parser.add_argument("--pulls-fd", type=int, required=True)
    parser.add_argument("--death-fd", type=int, required=True)
    parser.add_argument("--listener-fd", type=int)
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args()
    configure_logs(f"worker-{args.rank}", args.log_level)
    fd = args.listener_fd
    listener = None if fd is None else socket.socket(fileno=fd)
    steps, pulls = BlockingChannel(args.steps_fd), BlockingChannel(args.pulls_fd)
    code = _run(steps, pulls, args.death_fd, listener)
    logging.shutdown()
    # A pull may still be copying: no interpreter shutdown under its feet.
    os._exit(code)


if __name__ == "__main__":
    main()
