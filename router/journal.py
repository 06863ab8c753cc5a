"""The router's log: one line of JSON for each event, whatever the values in it hold."""

from typing import IO, Any

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

MAX_VALUE_CHARS = 1024  # of any one value: somebody else may have chosen it


class _Lines:
    """Writes lines until nobody reads them: a full disk or a closed pipe costs the log only."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            pass

    debug = info = warning = error = critical = exception = msg


def journal(stream: IO[str]) -> FilteringBoundLogger:
    """A logger of its own: structlog's global configuration is left as it is."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        _Lines(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _cut,
            structlog.processors.JSONRenderer(default=ascii, ensure_ascii=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        cache_logger_on_first_use=True,
    )
    return logger


def _cut(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {key: _cut_value(value) for key, value in event.items()}


def _cut_value(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        return value[:MAX_VALUE_CHARS] + f"... ({len(value)} characters)"
    return value
