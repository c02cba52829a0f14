"""The worker: one process per rank, which owns the model and a KV cache.

``python -m splitserve.engine.worker``, started by `splitserve.engine.process`. Steps come over one
socket and run in the main thread; pulls come over another and run beside them in a thread. A third
thread does nothing but wait for the node's end of a pipe to close: however the node ends, the
worker goes at once, also in the middle of a step. An error in a pull is that pull's; an error
anywhere else ends the process, since nobody can say what a half-done step has left.
"""

import argparse
import logging
import os
import threading
import time
from typing import Any, NoReturn

import torch

from splitserve import native
from splitserve.core.config import EngineConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.logs import configure_logs
from splitserve.core.request import TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import Batch, BatchRow, SampleSpec, StepOutput
from splitserve.engine.capacity import choose_max_model_len, choose_num_blocks
from splitserve.engine.messages import BlockingChannel, Failure, Ready, Reply, Start
from splitserve.engine.sampler import sample
from splitserve.kv.cache import KVCache
from splitserve.kv.layout import KVLayout
from splitserve.kv.memory import free_bytes, remove, segment_name
from splitserve.model.config import ModelConfig, resolve_dtype
from splitserve.model.decoder import Decoder, ModelInput
from splitserve.model.loader import load_decoder
from splitserve.transfer.shm import TRANSPORT, ShmExporter, ShmImporter

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 2.0
"""How often a model that takes long to load says how far it is."""

PEER_CHECK_INTERVAL_S = 1.0
"""How often memory of peers that are gone is given back while no pulls come."""


class Worker:
    """One rank: its part of the model, its KV, and its side of transfers.

    Args:
        start: What to be.

    Raises:
        SplitserveError: The model or the memory cannot be used; one clear sentence.
    """

    def __init__(self, start: Start) -> None:
        config = start.config
        model = ModelConfig.from_dir(config.model)
        layout = _layout(model, config)
        model_len = model.max_position_embeddings
        num_blocks = choose_num_blocks(config, layout, model_len, free_bytes())
        self._max_model_len = choose_max_model_len(config, layout, model_len, num_blocks)
        self._model = model
        self._decoder = _load(model, config, layout.dtype)
        self._cache = KVCache.create(segment_name(start.epoch, start.rank), layout, num_blocks)
        self._tensor = self._cache.tensor
        self._exporter = ShmExporter(self._cache)
        self.importer = ShmImporter(self._cache, start.rank)

    def warm_up(self) -> None:
        """Runs a prompt and a token, so that no request pays for what happens once.

        Writes to block 0, which is nobody's yet and is not read before it is written.
        """
        spec = SampleSpec(SamplingParams(seed=0), 0)
        count = min(self._cache.layout.block_size, self._max_model_len)
        prompt = BatchRow("", (0,) * count, 0, (0,), spec)
        token = BatchRow("", (0,), count - 1, (0,), spec)
        for row in (prompt, token):
            self.execute(Batch((row,)))

    def ready(self) -> Ready:
        """What this worker has become."""
        return Ready(
            memory=self._exporter.export(),
            transport=TRANSPORT,
            max_model_len=self._max_model_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
        )

    def execute(self, batch: Batch) -> StepOutput:
        """Computes a step."""
        rows = [
            (row.token_ids, row.start, row.block_ids, row.sample is not None) for row in batch.rows
        ]
        model_input = ModelInput.from_rows(rows, self._cache.layout.block_size)
        logits = self._decoder.forward(model_input, self._tensor)
        specs = [row.sample for row in batch.rows if row.sample is not None]
        sampled = iter(sample(logits, specs))
        samples: list[TokenLogprob | None] = [
            None if row.sample is None else next(sampled) for row in batch.rows
        ]
        return StepOutput(tuple(samples))

    def close(self) -> None:
        """Takes the KV's name away."""
        self._exporter.close()


def _layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=resolve_dtype(config.dtype, model),
        layer_begin=0,
        layer_end=model.num_layers,
        head_begin=0,
        head_end=model.num_kv_heads,
    )


def _load(model: ModelConfig, config: EngineConfig, dtype: str) -> Decoder:
    begin = said = time.monotonic()

    def progress(done: int, layers: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PROGRESS_INTERVAL_S:
            said = time.monotonic()
            log.info("loading the model", extra={"layers": f"{done}/{layers}"})

    seed = config.seed if config.use_dummy_weights else None
    decoder = load_decoder(model, config.model, dtype, dummy_seed=seed, progress=progress)
    log.info(
        "model loaded",
        extra={
            "model": model.name,
            "dtype": dtype,
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
        steps.send(Reply(call.call_id, output))


def _serve_pulls(importer: ShmImporter, pulls: BlockingChannel) -> None:
    """One at a time; those that wait do so in the socket."""
    while True:
        if not pulls.wait(PEER_CHECK_INTERVAL_S):
            importer.drop_dead()
            continue
        call = pulls.receive()
        if call is None:
            return
        result: Any
        try:
            result = importer.pull(call.work)
        except Exception as error:
            result = Failure.of(error)
            expected = isinstance(error, SplitserveError)
            log.warning("a pull failed: %s", result.message, exc_info=not expected)
        pulls.send(Reply(call.call_id, result))


def _leave_with_node(death_fd: int, epoch: str, rank: int) -> None:
    """Blocks until the node's end of the pipe is closed, then ends this process."""
    os.read(death_fd, 1)
    remove(segment_name(epoch, rank))
    os._exit(1)


def _run(steps: BlockingChannel, pulls: BlockingChannel, death_fd: int) -> int:
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
        worker = Worker(start)
        worker.warm_up()
    except Exception as error:
        if not isinstance(error, SplitserveError):
            log.exception("the worker could not start")
        remove(segment_name(start.epoch, start.rank))
        steps.send(Failure.of(error))
        return 1
    steps.send(worker.ready())
    threading.Thread(target=_serve_pulls, args=(worker.importer, pulls), daemon=True).start()
    try:
        _serve_steps(worker, steps)
    except Exception:
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
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args()
    configure_logs(f"worker-{args.rank}", args.log_level)
    code = _run(BlockingChannel(args.steps_fd), BlockingChannel(args.pulls_fd), args.death_fd)
    logging.shutdown()
    # A pull may still be copying: no interpreter shutdown under its feet.
    os._exit(code)


if __name__ == "__main__":
    main()
