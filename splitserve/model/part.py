"""Which part of a model a rank holds. Imports no torch."""

from dataclasses import dataclass, replace

from splitserve.core.errors import InvalidArgumentError
from splitserve.core.parallel import ONE_RANK, ParallelConfig
from splitserve.kv.layout import KVLayout
from splitserve.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cut:
    """Some of a whole that is counted: heads, rows, tokens of the vocabulary.

    Attributes:
        begin: The first.
        end: One past the last.
        total: How many the whole has.
    """

    begin: int
    end: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Cut":
        """All of it."""
        return cls(0, total, total)

    @classmethod
    def share(cls, total: int, index: int, count: int) -> "Cut":
        """One of ``count`` shares that differ by one at most."""
        return cls(total * index // count, total * (index + 1) // count, total)

    @property
    def size(self) -> int:
        """How many it has."""
        return self.end - self.begin

    def within(self, total: int, offset: int) -> "Cut":
        """The same of something larger, in which this whole begins at ``offset``."""
        return Cut(self.begin + offset, self.end + offset, total)

    def times(self, width: int) -> "Cut":
        """The same in a smaller unit, of which each one has ``width``."""
        return Cut(self.begin * width, self.end * width, self.total * width)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one rank holds of a model.

    Attributes:
        tensor_rank: Its place among those that share its layers.
        tensor_size: How many they are.
        layers: Its layers.
        heads: Its query heads.
        kv_heads: Its KV heads; with more ranks than heads, several ranks hold the same one.
    """

    tensor_rank: int
    tensor_size: int
    layers: Cut
    heads: Cut
    kv_heads: Cut

    @classmethod
    def whole(cls, config: ModelConfig) -> "ModelPart":
        """All of the model."""
        return cls.of(config, ONE_RANK, 0)

    @classmethod
    def of(cls, config: ModelConfig, parallel: ParallelConfig, rank: int) -> "ModelPart":
        """A rank's part.

        Raises:
            InvalidArgumentError: The model cannot be shared out like this.
        """
        _check(config, parallel)
        stage, tensor_rank = divmod(rank, parallel.tensor_parallel_size)
        size = parallel.tensor_parallel_size
        kv_heads = Cut.share(config.num_kv_heads, tensor_rank, size)
        return cls(
            tensor_rank=tensor_rank,
            tensor_size=size,
            layers=Cut(*parallel.stage_layers(config.num_layers)[stage], config.num_layers),
            heads=Cut.share(config.num_heads, tensor_rank, size),
            # Of fewer heads than ranks, each has one.
            kv_heads=replace(kv_heads, end=max(kv_heads.end, kv_heads.begin + 1)),
        )

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.layers.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes logits."""
        return self.layers.end == self.layers.total

    def share(self, total: int) -> Cut:
        """Its share of anything that tensor ranks share out evenly."""
        return Cut.share(total, self.tensor_rank, self.tensor_size)

    def kv_layout(self, config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
        """The shape of its KV cache."""
        return KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
            layer_begin=self.layers.begin,
            layer_end=self.layers.end,
            head_begin=self.kv_heads.begin,
            head_end=self.kv_heads.end,
        )


def _check(config: ModelConfig, parallel: ParallelConfig) -> None:
    size = parallel.tensor_parallel_size
    if config.num_heads % size:
        raise InvalidArgumentError(
            f"tensor_parallel_size: {size} is not allowed; it must divide the model's "
            f"{config.num_heads} attention heads"
        )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise InvalidArgumentError(
            f"tensor_parallel_size: {size} is not allowed; it must divide the model's "
            f"{config.num_kv_heads} KV heads, or be a multiple of them"
        )
