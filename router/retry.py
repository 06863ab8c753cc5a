"""What a failed attempt means for its request: another one, or the end and in which words."""

import grpc

from router.attempt import AttemptFailed
from router.errors import Broken, InvalidRequest, Overloaded, RequestFailed, Unavailable
from router.legs import Ended


def may_try_again(failure: AttemptFailed, only_first_tokens: bool) -> bool:
    """Whether another attempt could still give the client exactly one stream.

    First tokens depend on the prompt and the seed alone, so an attempt may start over behind them.
    What decode has streamed beyond is its client's: nobody else continues it.
    """
    return failure.final is None and only_first_tokens


def conclusion(
    failure: AttemptFailed, num_delivered: int, retry_after_s: float, remark: str = ""
) -> RequestFailed:
    """The request's end after this attempt, with the count of tokens the client has."""
    delivered = f"tokens delivered: {num_delivered}"
    remark = f"; {remark}" if remark else ""
    if failure.final is not None:
        return _final(failure.final, delivered)
    shed = failure.shed
    if shed is not None:
        return Overloaded(
            f"{shed.worker.name} has no room: {shed.details}; {delivered}{remark}",
            retry_after_s=shed.retry_after_s or retry_after_s,
        )
    again = f"repeat the request after {retry_after_s:g} s"
    return Unavailable(f"{failure}; {delivered}{remark}; {again}", retry_after_s=retry_after_s)


def _final(end: Ended, delivered: str) -> RequestFailed:
    said = f"{end.worker.name} said {end.code.name}: {end.details}; {delivered}"
    if end.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return InvalidRequest("request", said)
    return Broken(said)
