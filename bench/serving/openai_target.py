"""Load on a server that speaks OpenAI's completions, over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any, Self

import httpx2

from bench.serving.target import TargetError
from bench.serving.workload import PlannedRequest

SSE_PREFIX = "data: "
SSE_END = "[DONE]"


class OpenAiTarget:
    """A server of OpenAI's completions that takes token ids, as vLLM, SGLang and llama.cpp do.

    Args:
        url: Up to and with ``/v1``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Nothing waits for a connection: the load never waits for the server.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False)
        self._model = ""

    async def answer(self, request: PlannedRequest) -> AsyncIterator[int]:
        """See `Target`."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        told = 0
        try:
            async with self._http.stream("POST", f"{self._url}/completions", json=body) as response:
                if response.is_error:
                    raise TargetError(f"{response.status_code}: {(await response.aread())[:500]!r}")
                async for line in response.aiter_lines():
                    text = line.removeprefix(SSE_PREFIX)
                    if text in (line, SSE_END):
                        continue
                    total = _tokens_so_far(json.loads(text), told)
                    if total > told:
                        yield total - told
                        told = total
        except httpx2.HTTPError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error

    async def __aenter__(self) -> Self:
        try:
            answer = (await self._http.get(f"{self._url}/models")).raise_for_status()
        except httpx2.HTTPError as error:
            raise TargetError(f"{self._url}/models: {error}") from error
        self._model = answer.json()["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _tokens_so_far(event: dict[str, Any], told: int) -> int:
    """What an event of a stream brings the answer to.

    A server that counts says so in every event, since several tokens may share one; from one
    that does not, each event with a choice is a token.
    """
    if error := event.get("error"):
        raise TargetError(str(error))
    if usage := event.get("usage"):
        return int(usage["completion_tokens"])
    return told + bool(event.get("choices"))
