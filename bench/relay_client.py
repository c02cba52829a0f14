"""The router question's clients, all in one process; the same for the router and its peer."""

import asyncio
import time
from typing import Any

from bench.child import serve
from splitserve.rpc.channel import open_channel
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

TIMEOUT_S = 120.0


class Clients:
    """Asks for answers by streams, on one channel per address; lives in one event loop."""

    def __init__(self) -> None:
        self._stubs: dict[str, Any] = {}

    async def relay(self, address: str, streams: int, tokens: int, prompt: str) -> dict[str, float]:
        """Reads answers side by side: how long all took, and how many messages that was."""
        begin = time.perf_counter()
        messages = await asyncio.gather(
            *(self._read(address, tokens, prompt) for _ in range(streams))
        )
        return {"seconds": time.perf_counter() - begin, "messages": sum(messages)}

    async def first_token(self, address: str, prompt: str, count: int) -> list[float]:
        """Seconds to the first and only token, one request after the other."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            await self._read(address, 1, prompt)
            seconds.append(time.perf_counter() - begin)
        return seconds

    async def _read(self, address: str, tokens: int, prompt: str) -> int:
        """One answer; returns its number of messages."""
        sampling = common_pb2.SamplingParams(max_tokens=tokens)
        request = router_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
        messages = received = 0
        call = self._stub(address).Generate(request, timeout=TIMEOUT_S)
        try:
            async for message in call:
                messages += 1
                received += len(message.token_ids)
        finally:
            call.cancel()
        assert received == tokens, "every token arrives once"
        return messages

    def _stub(self, address: str) -> Any:
        if address not in self._stubs:
            self._stubs[address] = router_pb2_grpc.RouterStub(open_channel(address))
        return self._stubs[address]


async def main() -> None:
    """Does as it is asked."""
    clients = Clients()

    async def answer(what: str, **arguments: Any) -> Any:
        verb: Any = {"relay": clients.relay, "first_token": clients.first_token}[what]
        return await verb(**arguments)

    await serve(answer)


if __name__ == "__main__":
    asyncio.run(main())
