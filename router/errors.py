"""Every way a request ends other than well.

    RequestFailed
    ├── InvalidRequest     INVALID_ARGUMENT    the client must change the request
    ├── Repeated           ALREADY_EXISTS      a request of the same id still runs
    ├── Unauthenticated    UNAUTHENTICATED     no key, or an unknown one
    ├── Overloaded         RESOURCE_EXHAUSTED  worth repeating after `retry_after_s`
    ├── Unavailable        UNAVAILABLE         no replica, or one was lost; worth repeating
    ├── TimedOut           DEADLINE_EXCEEDED   the client's deadline, or ours, passed
    ├── Withdrawn          CANCELLED           the client asked for it
    └── Broken             INTERNAL            repeating it will not help

Both doors answer from `code`, `message` and the fields beside them.
"""

from grpc import StatusCode

SHOWN_CHARACTERS = 80  # of a value somebody else chose, in a message or a log line


class RequestFailed(Exception):
    """The end of one request, said to its client. `reason` is one word for metrics and logs."""

    code = StatusCode.INTERNAL
    reason = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestFailed):
    """One field of a request is wrong: which one, what it holds, what would be right."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "invalid"

    def __init__(self, field: str, problem: str, *, kind: str = "invalid_value") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.kind = kind


class TooLarge(InvalidRequest):
    """The input is over a limit that is known before it is read."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem, kind="request_too_large")


class TooSlow(InvalidRequest):
    """The client has begun to say something and does not go on."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem, kind="request_timeout")


class Repeated(RequestFailed):
    code = StatusCode.ALREADY_EXISTS
    reason = "repeated"


class Unauthenticated(RequestFailed):
    code = StatusCode.UNAUTHENTICATED
    reason = "unauthenticated"


class Overloaded(RequestFailed):
    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "overloaded"


class Unavailable(RequestFailed):
    code = StatusCode.UNAVAILABLE
    reason = "unavailable"


class TimedOut(RequestFailed):
    code = StatusCode.DEADLINE_EXCEEDED
    reason = "deadline"


class Withdrawn(RequestFailed):
    code = StatusCode.CANCELLED
    reason = "cancelled"


class Broken(RequestFailed):
    code = StatusCode.INTERNAL
    reason = "internal"


class CannotStart(Exception):
    """The router cannot serve; the message is one sentence that says what to do."""


def shown(value: object) -> str:
    """A value somebody else chose, escaped to one line and cut to a length fit for a message."""
    text = ascii(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"
