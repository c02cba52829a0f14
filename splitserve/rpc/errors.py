"""The one place where errors become gRPC statuses, and statuses errors."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from splitserve.core.errors import (
    InternalError,
    InvalidArgumentError,
    SplitserveError,
    error_from_code,
)

log = logging.getLogger(__name__)


def error_from_rpc(error: grpc.RpcError) -> SplitserveError:
    """The error that a failed call stands for."""
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        return InternalError(str(error))
    return error_from_code(error.code().name, error.details() or "no details")


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands in for a request whose bytes are not a message."""

    reason: str


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        # Left to itself gRPC answers INTERNAL, which blames us for what the client sent.
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed("request: not a valid message; text must be valid UTF-8")

    return parse


async def _fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if not isinstance(error, SplitserveError):
        log.error("unexpected error in a call", exc_info=error)
        error = InternalError("an internal error; the daemon's log has the details")
    try:
        await context.abort(grpc.StatusCode[error.code], error.message)
    except grpc.aio.InternalError:
        # The failure cut off a write, and gRPC takes no status behind one that is under way. The
        # call is torn down without: its client does not read, or its own deadline has told it.
        raise asyncio.CancelledError from None


async def _checked(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _check(message)


def _check(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidArgumentError(request.reason)
    return _checked(request) if hasattr(request, "__aiter__") else request


def _guard_call(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(_check(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _fail(context, error)

    return call


def _guard_stream(behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async for response in behavior(_check(request), context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _fail(context, error)

    return stream


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps every `SplitserveError` to its status.

    Anything else becomes INTERNAL, with details in the daemon's log only: no traceback and no
    other client's text crosses the wire.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps the handler; gRPC calls this once per call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        # A handler that writes through its context is a coroutine, one that yields a generator.
        guard = _guard_stream if inspect.isasyncgenfunction(behavior) else _guard_call
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(
            guard(behavior),
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
