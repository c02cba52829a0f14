"""How many ranks a node has, and how they share the model."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from splitserve.core.errors import InvalidArgumentError, invalid

MAX_RANKS = 64
"""Worker processes of one node."""


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor ranks share every layer, pipeline stages share out the layers.

    Rank ``stage * tensor_parallel_size + tensor_rank`` is one worker process.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages that layers are shared out to.
        pipeline_layers: Layers of each stage, the first one first; empty shares them out evenly.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, field) < 1:
                raise invalid(field, getattr(self, field), "at least 1")
        if self.num_ranks > MAX_RANKS:
            raise invalid(
                "tensor_parallel_size * pipeline_parallel_size", self.num_ranks, f"<= {MAX_RANKS}"
            )
        if not self.pipeline_layers:
            return
        if len(self.pipeline_layers) != self.pipeline_parallel_size:
            raise invalid(
                "pipeline_layers",
                self.pipeline_layers,
                f"one number for each of the {self.pipeline_parallel_size} stages",
            )
        if min(self.pipeline_layers) < 1:
            raise invalid("pipeline_layers", self.pipeline_layers, "at least 1 layer per stage")

    def stage_layers(self, num_layers: int) -> tuple[tuple[int, int], ...]:
        """Each stage's first layer and one past its last.

        Raises:
            InvalidArgumentError: So many layers cannot be shared out like this.
        """
        stages = self.pipeline_parallel_size
        if stages > num_layers:
            raise InvalidArgumentError(
                f"pipeline_parallel_size: {stages} is not allowed; "
                f"the model has {num_layers} layers"
            )
        if not self.pipeline_layers:
            edges = [num_layers * stage // stages for stage in range(stages + 1)]
        else:
            edges = [0, *accumulate(self.pipeline_layers)]
            if edges[-1] != num_layers:
                raise InvalidArgumentError(
                    f"pipeline_layers: {','.join(map(str, self.pipeline_layers))} is not allowed; "
                    f"they must add up to the model's {num_layers} layers"
                )
        return tuple(pairwise(edges))

    @property
    def num_ranks(self) -> int:
        """Worker processes of the node."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


ONE_RANK = ParallelConfig()
