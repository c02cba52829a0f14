"""Which host takes which stages, so that no layer's KV leaves its host."""

from dataclasses import dataclass
from itertools import pairwise

from splitserve.core.errors import InvalidArgumentError, invalid
from splitserve.core.parallel import ParallelConfig


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """One host's part of a prefill node and of the decode node that pulls from it.

    Attributes:
        layers: First layer and one past the last, of both nodes.
        prefill_ranks: The prefill node's ranks that run there.
        decode_ranks: The decode node's.
    """

    layers: tuple[int, int]
    prefill_ranks: tuple[int, ...]
    decode_ranks: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices it takes, one for each rank."""
        return len(self.prefill_ranks) + len(self.decode_ranks)


def place_aligned(
    prefill: ParallelConfig, decode: ParallelConfig, num_layers: int, devices_per_host: int
) -> tuple[HostPlacement, ...]:
    """Places two nodes so that source and target of every layer are on one host.

    DistServe's rule (Zhong et al., 2024, §4.2). A host holds whole stages of both nodes, so its
    layers begin and end where stages of both do; with stages of equal length those places are a
    least common multiple apart. Layers that have to stay together take a host of their own, or
    share one as long as there are devices.

    Args:
        prefill: The prefill node's sizes.
        decode: The decode node's.
        num_layers: Layers of the model.
        devices_per_host: How many ranks a host can run.

    Returns:
        The hosts, by layers.

    Raises:
        InvalidArgumentError: A number is out of range, or there is no such placement.
    """
    if devices_per_host < 1:
        raise invalid("devices_per_host", devices_per_host, "at least 1")
    hosts: list[HostPlacement] = []
    for layers in _inseparable(prefill, decode, num_layers):
        one = HostPlacement(
            layers,
            _ranks_within(prefill, num_layers, layers),
            _ranks_within(decode, num_layers, layers),
        )
        if one.num_devices > devices_per_host:
            raise InvalidArgumentError(
                f"devices_per_host: {devices_per_host} is not enough for an aligned placement; "
                f"layers {layers[0]}..{layers[1]} have to stay together and take "
                f"{len(one.prefill_ranks)} prefill and {len(one.decode_ranks)} decode ranks"
            )
        if hosts and hosts[-1].num_devices + one.num_devices <= devices_per_host:
            last = hosts.pop()
            one = HostPlacement(
                (last.layers[0], layers[1]),
                last.prefill_ranks + one.prefill_ranks,
                last.decode_ranks + one.decode_ranks,
            )
        hosts.append(one)
    return tuple(hosts)


def _inseparable(
    prefill: ParallelConfig, decode: ParallelConfig, num_layers: int
) -> list[tuple[int, int]]:
    """The shortest runs of layers that are whole stages of both nodes."""
    ours, theirs = (
        {end for _, end in parallel.stage_layers(num_layers)} for parallel in (prefill, decode)
    )
    edges = [0, *sorted(ours & theirs)]
    return list(pairwise(edges))


def _ranks_within(
    parallel: ParallelConfig, num_layers: int, layers: tuple[int, int]
) -> tuple[int, ...]:
    size = parallel.tensor_parallel_size
    return tuple(
        stage * size + tensor_rank
        for stage, (begin, end) in enumerate(parallel.stage_layers(num_layers))
        if layers[0] <= begin and end <= layers[1]
        for tensor_rank in range(size)
    )
