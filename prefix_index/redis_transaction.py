"""An optimistic transaction on a worker's state: read under WATCH, decide, write all or nothing."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redis.exceptions import ResponseError

from prefix_index.index import Change, IndexUnavailable, OutOfStep, StaleEpoch
from prefix_index.redis_link import Command, Exchange, RedisLink, Reply
from prefix_index.redis_schema import Keys, State, entry_fields, read_int


class Transaction:
    """`state` and `answer` are as of the WATCH; `commit` succeeds only if they still hold."""

    def __init__(
        self, session: Exchange, keys: Keys, max_changes: int, state: State | None, answer: Reply
    ) -> None:
        self._session = session
        self._keys = keys
        self._max_changes = max_changes
        self.state = state
        self.answer = answer

    async def commit(self, writes: Sequence[Command], change: Change) -> bool:
        """Write, and tell the mirrors of `change`. False: somebody else wrote first."""
        length = ("MAXLEN", "~", self._max_changes)
        tell: Command = ("XADD", self._keys.events, *length, "*", *entry_fields(change))
        results = executed(await self._session(("MULTI",), *writes, tell, ("EXEC",)))
        if results is None:
            return False
        for command, result in zip((*writes, tell), results, strict=True):
            if isinstance(result, ResponseError):
                await self._heal(command[1], result)
        return True

    async def _heal(self, key: bytes | str | int, error: ResponseError) -> None:
        """A write met a value that none of ours can have left there."""
        if key not in (self._keys.workers, self._keys.events):
            raise OutOfStep(f"{key!r} is damaged: {error}")
        if is_wrong_type(error):
            await self._session(("UNLINK", key))  # heartbeats and surveys make good what it lost


@asynccontextmanager
async def transaction(
    link: RedisLink,
    keys: Keys,
    max_changes: int,
    worker: str,
    epoch: int | None,
    query: Command = ("PING",),
) -> AsyncIterator[Transaction]:
    """Begin one on `worker`. Raises StaleEpoch when there is a later life than `epoch`."""
    epoch_key, state_key = keys.epoch(worker), keys.state(worker)
    async with link.session() as session:
        _, newest, state, answer = await session(
            ("WATCH", epoch_key, state_key),
            ("GET", epoch_key),
            ("HMGET", state_key, "epoch", "seq", "fp"),
            query,
        )
        if epoch is not None:
            refuse_stale(worker, epoch, newest)
        yield Transaction(session, keys, max_changes, State.read(state), answer)


def refuse_stale(worker: str, epoch: int, newest_reply: Reply) -> None:
    newest = read_int(newest_reply) or 0
    if epoch < newest:
        raise StaleEpoch(f"worker {worker}: epoch {epoch} has been followed by epoch {newest}")


def executed(replies: list[Reply]) -> list[Reply] | None:
    """What the commands of a MULTI/EXEC answered; None when a watched key had changed.

    Raises IndexUnavailable when Redis would not take them: it is full, or the ACL forbids one.
    """
    *queued, results = replies
    if isinstance(results, ResponseError):
        refused = next((reply for reply in queued if isinstance(reply, ResponseError)), results)
        raise IndexUnavailable(f"Redis refused a transaction: {refused}")
    return None if results is None else list(results)


def is_wrong_type(reply: Reply) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")
