"""How a worker says no: one status, one sentence, and when to try again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeAlias
from typing import Any as Anything

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from engine import request as engine_request
from transport.orders import TransferFailed
from transport.plain_words import why

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Anything, Anything]
else:
    Context = grpc.aio.ServicerContext  # generic for type checkers only

STATUS = {status.name: status for status in grpc.StatusCode}


class Refused(Exception):
    """The request ends here. `retry_after_s` is set where the same request may pass later."""

    def __init__(
        self, code: grpc.StatusCode, reason: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the engine, a transfer or another rank says into this worker's one refusal."""
    try:
        yield
    except engine_request.QueueFull as error:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        raise Refused(code, str(error), error.retry_after_ms / 1000) from error
    except engine_request.Refused as error:
        raise Refused(STATUS[error.code], str(error)) from error
    except TransferFailed as error:
        raise Refused(STATUS[error.code], error.reason) from error
    except grpc.aio.AioRpcError as error:
        reason = f"a rank of this worker answered {error.code().name}: {why(error)}"
        raise Refused(error.code(), reason) from error


async def abort(context: Context, refused: Refused) -> NoReturn:
    """End the call with the refusal; the hint travels as google.rpc.RetryInfo."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if refused.retry_after_s is not None:
        details = Any()
        details.Pack(RetryInfo(retry_delay=_duration(refused.retry_after_s)))
        number: int = refused.code.value[0]
        status = Status(code=number, message=refused.reason, details=[details])
        metadata = rpc_status.to_status(status).trailing_metadata
    await context.abort(refused.code, refused.reason, metadata)
    raise AssertionError("context.abort raises")


async def abort_transfer(context: Context, failure: TransferFailed) -> NoReturn:
    """End a call between ranks with the transfer's own status and reason."""
    await abort(context, Refused(STATUS[failure.code], failure.reason))


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
