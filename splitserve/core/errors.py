"""The one family of errors; each class is one gRPC status."""

from typing import ClassVar


class SplitserveError(Exception):
    """A failure with a status that clients see.

    Attributes:
        code: Name of the gRPC status, for example ``"NOT_FOUND"``.
        message: For people: names the field, the value and what is allowed.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgumentError(SplitserveError):
    """The request can never be served as it is."""

    code = "INVALID_ARGUMENT"


class ResourceExhaustedError(SplitserveError):
    """A bounded queue is full; the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class UnavailableError(SplitserveError):
    """No node can serve this now."""

    code = "UNAVAILABLE"


class DeadlineExceededError(SplitserveError):
    """The client's deadline has passed."""

    code = "DEADLINE_EXCEEDED"


class CancelledError(SplitserveError):
    """The caller went away. Not `asyncio.CancelledError`, which is about tasks."""

    code = "CANCELLED"


class NotFoundError(SplitserveError):
    """No such request, ticket or file."""

    code = "NOT_FOUND"


class AlreadyExistsError(SplitserveError):
    """A request of that id is running."""

    code = "ALREADY_EXISTS"


class FailedPreconditionError(SplitserveError):
    """The other side is not what the caller expects."""

    code = "FAILED_PRECONDITION"


class UnauthenticatedError(SplitserveError):
    """The caller has not shown who it is."""

    code = "UNAUTHENTICATED"


class InternalError(SplitserveError):
    """A fault of ours; the log has the details."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[SplitserveError]] = {
    cls.code: cls for cls in SplitserveError.__subclasses__()
}


def error_from_code(code: str, message: str) -> SplitserveError:
    """The error of a status name; unknown names become `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)


def invalid(field: str, value: object, allowed: str) -> InvalidArgumentError:
    """An `InvalidArgumentError` that names the field, the value and what is allowed."""
    return InvalidArgumentError(f"{field}: {value!r} is not allowed; allowed: {allowed}")
