"""The prefix index in Redis 7.0 or later: plain commands, optimistic transactions, no scripts.

Each operation reads the worker's epoch and state under WATCH, decides here, and writes
everything it changes, with the stream entry that tells the mirrors, in one MULTI/EXEC. When
somebody else wrote in between, EXEC does nothing and the operation starts again.
docs/prefix-index.md has the keys.

A heartbeat watches nothing: its lease key belongs to one epoch, so it cannot touch another life's.
It renews first, for a full Redis takes PEXPIRE and no transaction; then it renews and reads all
that the worker compares in one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

from redis.exceptions import ResponseError

from prefix_index.events import PackedEvents
from prefix_index.index import (
    EMPTY,
    UNPROVEN,
    BlockEvent,
    Changes,
    Clock,
    Cursor,
    EntriesCleared,
    EntriesPublished,
    Holdings,
    IndexUnavailable,
    Load,
    Member,
    OutOfStep,
    Residency,
    Survey,
    WorkerGone,
    WorkerRecord,
    WorkerRegistered,
    changed,
    unapplied,
)
from prefix_index.redis_link import Command, RedisLink, Reply
from prefix_index.redis_schema import (
    Changed,
    Keys,
    State,
    changed_entries,
    changes_of,
    read_entries,
    read_entry,
    read_load,
    read_record,
)
from prefix_index.redis_transaction import (
    Transaction,
    executed,
    is_wrong_type,
    refuse_stale,
    transaction,
)

EPOCH_TTL_S = 86_400
MAX_ATTEMPTS = 3
WORKERS_A_TURN = 64
SCAN_BLOCKS = 1024  # about 1 ms of parsing between two turns of the event loop
MAX_ENTRIES_A_READ = 16
FIRST_LOOKUP_BLOCKS = 32


class RedisIndex:
    """`url` as RedisLink takes it. A command is given up after `timeout_s`.

    Entries outlive their worker's lease by `retention_s`, so that one that was only slow finds them
    again. The stream keeps about `max_changes` changes. One object serves one follower.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        prefix: str = "kvferry",
        timeout_s: float = 1.0,
        retention_s: float = 60.0,
        max_changes: int = 4096,
    ) -> None:
        self._keys = Keys(prefix)
        self._link = RedisLink(url, clock, timeout_s=timeout_s)
        self._stream_link = RedisLink(url, clock, timeout_s=timeout_s)
        self._retention_ms = int(retention_s * 1000)
        self._max_changes = max_changes
        self._records: dict[str, tuple[Reply, WorkerRecord | None]] = {}

    async def next_epoch(self, name: str) -> int:
        """Counts up, from the milliseconds of Redis's clock when there is no count.

        So epochs go on growing when Redis has lost the count, and its key may expire.
        """
        key = self._keys.epoch(name)
        (now,) = await self._link.exchange(("TIME",))
        start = int(now[0]) * 1000 + int(now[1]) // 1000
        for _ in range(MAX_ATTEMPTS):
            replies = await self._link.exchange(
                ("MULTI",),
                ("SET", key, start, "NX", "EX", EPOCH_TTL_S),
                ("INCR", key),
                ("EXPIRE", key, EPOCH_TTL_S),
                ("EXEC",),
            )
            epoch = (executed(replies) or [None, None])[1]
            if isinstance(epoch, int):
                return epoch
            await self._link.exchange(("UNLINK", key))  # not a number: nobody of ours wrote it
        raise IndexUnavailable(f"{key} does not count: {epoch}")

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        name, epoch = record.name, record.epoch
        blocks, lease = self._keys.blocks(name, epoch), self._keys.lease(name, epoch)
        state_key = self._keys.state(name)
        for _ in range(MAX_ATTEMPTS):
            async with self._transaction(name, epoch, ("HLEN", blocks)) as tx:
                writes: list[Command] = [("SET", self._keys.epoch(name), epoch, "EX", EPOCH_TTL_S)]
                if tx.state is not None and tx.state.epoch == epoch:
                    residency = tx.state.residency(num_blocks=tx.answer)
                else:
                    residency = EMPTY
                    writes.append(("UNLINK", state_key, blocks, *self._left_by(name, tx.state)))
                    writes.append(("HSET", state_key, "epoch", epoch, "seq", 0, "fp", "0"))
                writes += [
                    ("HSET", state_key, "record", record.to_json()),
                    ("SET", lease, record.load.to_json(), "PX", int(lease_s * 1000)),
                    *self._keep(name, epoch),
                    self._list(name),
                ]
                if await tx.commit(writes, WorkerRegistered(record, residency)):
                    return residency
        raise _contended(name)

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        lease, lease_ms = self._keys.lease(name, epoch), int(lease_s * 1000)
        renewal: Command = ("PEXPIRE", lease, lease_ms)
        lasting = (*self._keep(name, epoch), ("EXPIRE", self._keys.epoch(name), EPOCH_TTL_S))
        replies = await self._link.exchange(
            renewal,
            *lasting,
            ("MULTI",),
            ("GET", self._keys.epoch(name)),
            ("HMGET", self._keys.state(name), "epoch", "seq", "fp"),
            ("HLEN", self._keys.blocks(name, epoch)),
            renewal,
            ("EXEC",),
            ("SET", lease, load.to_json(), "XX", "PX", lease_ms),
            self._list(name),
        )
        *replies, _, listed = replies[1 + len(lasting) :]
        if is_wrong_type(listed):
            await self._link.exchange(("UNLINK", self._keys.workers))
        newest, state_reply, num_blocks, renewed = executed(replies) or [None] * 4
        refuse_stale(name, epoch, newest)
        state = State.read(state_reply)
        if renewed != 1 or state is None or state.epoch != epoch:
            return None
        return state.residency(num_blocks)

    async def deregister(self, name: str, epoch: int) -> None:
        for _ in range(MAX_ATTEMPTS):
            async with transaction(self._link, self._keys, self._max_changes, name, None) as tx:
                if tx.state is None or tx.state.epoch != epoch:
                    return
                writes: list[Command] = [
                    ("UNLINK", self._keys.state(name), *self._left_by(name, tx.state)),
                    ("SREM", self._keys.workers, name),
                ]
                if await tx.commit(writes, WorkerGone(name, epoch)):
                    return
        raise _contended(name)

    async def workers(self) -> list[WorkerRecord]:
        members = (await self.survey()).members
        return [members[name].record for name in sorted(members)]

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        """Which names are there is read only where the index is not what the caller knows."""
        if not events:
            return
        names = list(dict.fromkeys(event.name for event in events))
        blocks = self._keys.blocks(worker, epoch)
        look_up: Command = ("HMGET", blocks, *names)
        for attempt in range(MAX_ATTEMPTS):
            trusting = known is not None and attempt == 0 and len(names) == len(events)
            query: Command = ("HLEN", blocks) if trusting else look_up
            async with self._transaction(worker, epoch, query) as tx:
                state = _registered(worker, epoch, tx.state)
                new = unapplied(events, sequence, state.sequence)
                if not new:
                    return
                if isinstance(tx.answer, ResponseError):
                    raise OutOfStep(f"worker {worker}: its entries are damaged: {tx.answer}")
                if trusting:
                    if state.residency(tx.answer) != known:
                        continue
                    changes = changes_of(new)
                else:
                    found: dict[bytes, bytes | None] = dict(zip(names, tx.answer, strict=True))
                    changes = changed_entries(new, found)
                writes = self._entry_writes(worker, state, len(new), changes)
                change = EntriesPublished(worker, epoch, state.sequence + 1, tuple(new))
                if await tx.commit(writes, change):
                    return
        raise _contended(worker)

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        blocks, state_key = self._keys.blocks(worker, epoch), self._keys.state(worker)
        for _ in range(MAX_ATTEMPTS):
            async with self._transaction(worker, epoch, ("HLEN", blocks)) as tx:
                applied = _registered(worker, epoch, tx.state).sequence
                number = applied + 1 if sequence is None else sequence
                if number <= applied:
                    raise OutOfStep(f"worker {worker}: clear {number} came after event {applied}")
                writes: list[Command] = [
                    ("UNLINK", blocks),
                    ("HSET", state_key, "seq", number, "fp", "0"),
                    *self._keep(worker, epoch),
                ]
                if await tx.commit(writes, EntriesCleared(worker, epoch, number)):
                    return tx.answer if isinstance(tx.answer, int) else 0
        raise _contended(worker)

    async def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        """Costs a look at every live worker; routers ask a mirror instead."""
        workers = await self.workers()
        found = {record.name: 0 for record in workers}
        still = {record.name: self._keys.blocks(record.name, record.epoch) for record in workers}
        depth, step = 0, FIRST_LOOKUP_BLOCKS
        while still and depth < len(names):
            part = names[depth : depth + step]
            lookups: list[Command] = [("HMGET", key, *part) for key in still.values()]
            replies = await self._link.exchange(*lookups)
            for worker, values in zip(list(still), replies, strict=True):
                values = [] if isinstance(values, ResponseError) else values
                run = next((i for i, value in enumerate(values) if value is None), len(values))
                found[worker] += run
                if run < len(part):
                    del still[worker]
            depth, step = depth + len(part), 2 * step
        return found

    async def survey(self) -> Survey:
        listed, newest = await self._link.exchange(
            ("SMEMBERS", self._keys.workers), ("XREVRANGE", self._keys.events, "+", "-", "COUNT", 1)
        )
        if isinstance(listed, ResponseError):
            raise IndexUnavailable(f"{self._keys.workers} is damaged: {listed}")
        names = [(name.decode(errors="replace"), name) for name in listed]
        found = Survey({}, frozenset(), _newest(newest))
        for start in range(0, len(names), WORKERS_A_TURN):
            some = dict(names[start : start + WORKERS_A_TURN])
            found = found.joined(await self._survey_some(some))
            await asyncio.sleep(0)
        self._records = {name: self._records[name] for name in found.members}
        return found

    async def _survey_some(self, names: Mapping[str, bytes]) -> Survey:
        states = await self._states(list(names))
        lives = {name: state for name, (state, _) in states.items() if state is not None}
        await self._forget([raw for name, raw in names.items() if name not in lives])
        leases = await self._leases(lives)
        members: dict[str, Member] = {}
        num_garbage = 0
        for name, (lease, num_blocks) in leases.items():
            record = self._record(name, states[name][1])
            if record is None or (record.name, record.epoch) != (name, lives[name].epoch):
                num_garbage += 1
                await self.doubt(name, lives[name].epoch)
            elif lease is not None:
                load = read_load(lease)
                num_garbage += load is None
                record = record if load is None else record.with_load(load)
                members[name] = Member(record, lives[name].residency(num_blocks))
        expired = frozenset(name for name, (lease, _) in leases.items() if lease is None)
        return Survey(members, expired, Cursor((0, 0)), num_garbage)

    def _record(self, name: str, reply: Reply) -> WorkerRecord | None:
        """What is read once a second and changes once in a life is taken apart once."""
        text, record = self._records.get(name, (None, None))
        if record is None or text != reply:
            record = read_record(reply)
            self._records[name] = (reply, record)
        return record

    async def holdings(self, worker: str) -> Holdings | None:
        before = await self._state(worker)
        if before is None:
            return None
        entries: list[bytes] = []
        num_garbage = 0
        at = b"0"
        while True:
            (reply,) = await self._link.exchange(
                ("HSCAN", self._keys.blocks(worker, before.epoch), at, "COUNT", SCAN_BLOCKS)
            )
            if isinstance(reply, ResponseError):
                break  # nothing there is ours; the fingerprint will not fit
            at, pairs = reply
            found = read_entries(pairs)
            entries.append(found.data)
            num_garbage += len(pairs) // 2 - len(found)
            if at == b"0":
                break
        after = await self._state(worker)
        if after is None or after.epoch != before.epoch:
            return None
        joined = PackedEvents(b"".join(entries))
        return Holdings(before.epoch, before.sequence, after.sequence, joined, num_garbage)

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        block = ("BLOCK", max(1, int(wait_s * 1000))) if wait_s > 0 else ()
        after = f"{cursor[0]}-{cursor[1]}"
        (reply,) = await self._stream_link.exchange(
            ("XREAD", "COUNT", MAX_ENTRIES_A_READ, *block, "STREAMS", self._keys.events, after),
            wait_s=wait_s,
        )
        if isinstance(reply, ResponseError):
            raise IndexUnavailable(f"{self._keys.events} is damaged: {reply}")
        entries = reply[0][1] if reply else []
        read = [read_entry(fields) for _, fields in entries]
        changes = tuple(change for change in read if change is not None)
        last = _cursor(entries[-1][0]) if entries else cursor
        return Changes(last, changes, num_garbage=len(read) - len(changes))

    async def doubt(self, worker: str, epoch: int) -> None:
        state = await self._state(worker)
        if state is not None and state.epoch == epoch:
            await self._link.exchange(("HDEL", self._keys.state(worker), "fp"))

    async def close(self) -> None:
        await self._link.close()
        await self._stream_link.close()

    def _transaction(
        self, worker: str, epoch: int, query: Command
    ) -> AbstractAsyncContextManager[Transaction]:
        return transaction(self._link, self._keys, self._max_changes, worker, epoch, query)

    def _entry_writes(
        self,
        worker: str,
        state: State,
        num_events: int,
        change: Changed,
    ) -> list[Command]:
        blocks, state_key = self._keys.blocks(worker, state.epoch), self._keys.state(worker)
        writes: list[Command] = []
        if change.written:
            writes.append(("HSET", blocks, *chain.from_iterable(change.written.items())))
        if change.removed:
            writes.append(("HDEL", blocks, *change.removed))
        writes.append(("HSET", state_key, "seq", state.sequence + num_events))
        after = changed(state.fingerprint, change.added, change.removed)
        if after != UNPROVEN:
            writes.append(("HSET", state_key, "fp", f"{after:x}"))
        return [*writes, *self._keep(worker, state.epoch)]

    def _keep(self, name: str, epoch: int) -> tuple[Command, ...]:
        """Nothing of a worker's stays for ever."""
        return (
            ("PEXPIRE", self._keys.state(name), self._retention_ms),
            ("PEXPIRE", self._keys.blocks(name, epoch), self._retention_ms),
        )

    def _list(self, name: str) -> Command:
        """The list of names is mended by every heartbeat."""
        return ("SADD", self._keys.workers, name)

    def _left_by(self, name: str, state: State | None) -> tuple[str, ...]:
        if state is None:
            return ()
        return self._keys.blocks(name, state.epoch), self._keys.lease(name, state.epoch)

    async def _state(self, name: str) -> State | None:
        command = ("HMGET", self._keys.state(name), "epoch", "seq", "fp")
        (reply,) = await self._link.exchange(command)
        return State.read(reply)

    async def _states(self, names: Sequence[str]) -> dict[str, tuple[State | None, Reply]]:
        """Each worker's state, with its record as it stands there."""
        replies = await self._link.exchange(
            *(("HMGET", self._keys.state(name), "epoch", "seq", "fp", "record") for name in names)
        )
        found = {}
        for name, reply in zip(names, replies, strict=True):
            record = None if isinstance(reply, ResponseError) else reply[3]
            found[name] = (State.read(reply), record)
        return found

    async def _leases(self, lives: dict[str, State]) -> dict[str, tuple[Reply, Reply]]:
        """Each life's lease (its load, or None when it has lapsed) and its number of blocks."""
        commands: list[Command] = []
        for name, state in lives.items():
            commands.append(("GET", self._keys.lease(name, state.epoch)))
            commands.append(("HLEN", self._keys.blocks(name, state.epoch)))
        replies = await self._link.exchange(*commands)
        return dict(zip(lives, zip(replies[::2], replies[1::2], strict=True), strict=True))

    async def _forget(self, names: Sequence[bytes]) -> None:
        """Names of which nothing is left. One that lives after all is back with a heartbeat."""
        if names:
            await self._link.exchange(("SREM", self._keys.workers, *names))


def _registered(name: str, epoch: int, state: State | None) -> State:
    if state is None or state.epoch != epoch:
        raise OutOfStep(f"worker {name}: epoch {epoch} is not registered")
    return state


def _contended(name: str) -> IndexUnavailable:
    return IndexUnavailable(f"worker {name}: others wrote its state {MAX_ATTEMPTS} times in a row")


def _cursor(entry_id: bytes) -> Cursor:
    milliseconds, _, number = entry_id.partition(b"-")
    return Cursor((int(milliseconds), int(number)))


def _newest(entries: Reply) -> Cursor:
    return _cursor(entries[0][0]) if isinstance(entries, list) and entries else Cursor((0, 0))
