"""Load on a router of ours, over gRPC."""

from collections.abc import AsyncIterator
from typing import Self

from bench.serving.target import TargetError
from bench.serving.workload import PlannedRequest
from splitserve.client import AsyncClient
from splitserve.core.errors import SplitserveError
from splitserve.core.sampling import SamplingParams


class RouterTarget:
    """A router of ours.

    Args:
        address: Its ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def answer(self, request: PlannedRequest) -> AsyncIterator[int]:
        """See `Target`."""
        sampling = SamplingParams(
            max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True
        )
        try:
            async with self._client.generate(token_ids=request.prompt, sampling=sampling) as deltas:
                async for delta in deltas:
                    yield len(delta.token_ids)
        except SplitserveError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
