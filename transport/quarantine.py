"""When damage is no accident any more: which wires and which prefill workers to leave alone.

Of each link, that is, of each wire from one prefill rank to this decode rank, and of calls to each
rank that lends cells:

    SOUND         damage is repaired, and counted
    QUARANTINED   too much of it came: no new shipment over this wire until the cool-down is over
    ON_TRIAL      it is over: one transfer decides. Clean, and the link is SOUND; damaged, and it
                  is QUARANTINED for twice as long; without a cell, and the next one decides

Damage over several wires of one prefill worker is the worker's: then none of its wires is used for
a while. A later life of the worker starts clean. Pure: no clock, no wire, no log.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from protos.transfer_pb2 import Hello
from transport.config import TransportConfig
from transport.damage_rate import DamageRate
from transport.orders import Lender, ShipmentKey

CALL = "call"  # what brings cells that were asked for by a call, beside all wires
TRIAL_S = 1.0  # after which it is worth asking again whether a trial has ended


class Standing(StrEnum):
    SOUND = "sound"
    QUARANTINED = "quarantined"
    ON_TRIAL = "on trial"


@dataclass(frozen=True, slots=True)
class LinkName:
    """One wire from one rank of one life of a prefill worker, or calls to one of any worker."""

    worker: str
    epoch: int
    rank: int
    wire: str

    @classmethod
    def of(cls, hello: Hello) -> "LinkName":
        return cls(hello.prefill_worker, hello.prefill_epoch, hello.prefill_rank, hello.wire)

    @classmethod
    def by_call(cls, lender: Lender) -> "LinkName":
        return cls(lender.worker, lender.epoch, lender.rank, CALL)

    def __str__(self) -> str:
        return f"{self.wire} from {self.worker} rank {self.rank} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What is left alone now; without a wire it is the prefill worker as such."""

    worker: str
    epoch: int
    wire: str
    for_s: float  # already
    left_s: float
    reason: str


@dataclass(slots=True)
class Sentence:
    """How long something is left alone: each time twice as long, if it comes soon after."""

    first_s: float
    longest_s: float
    since: float = 0.0
    until: float = 0.0
    reason: str = ""
    served_s: float = 0.0  # the last one's length

    def pass_(self, now: float, reason: str) -> None:
        again = self.served_s and now < self.until + self.served_s
        self.served_s = min(2 * self.served_s, self.longest_s) if again else self.first_s
        self.since, self.until, self.reason = now, now + self.served_s, reason


@dataclass(slots=True)
class LinkRecord:
    """What is held against one link, or not."""

    rate: DamageRate
    sentence: Sentence
    standing: Standing = Standing.SOUND
    trial: ShipmentKey | None = None  # the transfer that decides
    num_clean: int = 0  # cells that it has brought

    def left_s(self, now: float) -> float:
        """How long it is to be left alone yet; 0: a call may come."""
        if self.standing is Standing.QUARANTINED:
            return max(0.0, self.sentence.until - now)
        return TRIAL_S if self.trial is not None else 0.0

    @property
    def reason(self) -> str:
        return "one transfer is trying it again" if self.trial else self.sentence.reason


@dataclass(slots=True)
class PeerRecord:
    """One life of one prefill worker."""

    epoch: int
    sentence: Sentence
    links: dict[tuple[int, str], LinkRecord] = field(default_factory=dict)  # by rank and wire

    @property
    def bad_wires(self) -> list[str]:
        """Those with a link that is not known to be sound."""
        links = self.links.items()
        bad = (wire for (_, wire), link in links if link.standing is not Standing.SOUND)
        return list(dict.fromkeys(bad))


class Quarantines:
    """All that one decode rank holds against prefill ranks."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._peers: OrderedDict[str, PeerRecord] = OrderedDict()
        self._trials: dict[ShipmentKey, list[LinkRecord]] = {}  # what each transfer decides

    def call(self, name: LinkName, now: float) -> Quarantined | None:
        """Why this caller is to have no link now; None when it may have one."""
        peer = self._peers.get(name.worker)
        if peer is None or peer.epoch != name.epoch:
            return None
        if (left_s := peer.sentence.until - now) > 0:
            return _quarantined(name.worker, peer, "", left_s, now)
        link = peer.links.get((name.rank, name.wire))
        if link is None:
            return None
        if (left_s := link.left_s(now)) > 0:
            return _quarantined(name.worker, peer, name.wire, left_s, now, link)
        if link.standing is Standing.QUARANTINED:
            link.standing = Standing.ON_TRIAL
        return None

    def opens(self, name: LinkName, key: ShipmentKey, now: float) -> Quarantined | None:
        """A shipment begins over an open link. Returns why no other one may."""
        peer, link = self._record(name)
        if link.standing is Standing.ON_TRIAL and link.trial is None:
            link.trial, link.num_clean = key, 0
            self._trials.setdefault(key, []).append(link)
        if (left_s := peer.sentence.until - now) > 0:
            return _quarantined(name.worker, peer, "", left_s, now)
        if (left_s := link.left_s(now)) > 0:
            return _quarantined(name.worker, peer, name.wire, left_s, now, link)
        return None

    def against(self, name: LinkName, key: ShipmentKey, now: float) -> str:
        """Why this transfer is not to call a lender now; empty when it may.

        What else is held against the lender's worker does not count: a transfer that it has begun
        may still need it.
        """
        peer = self._peers.get(name.worker)
        link = peer.links.get((name.rank, name.wire)) if peer is not None else None
        if peer is None or link is None or peer.epoch != name.epoch or link.trial == key:
            return ""
        return link.reason if link.left_s(now) > 0 else ""

    def calls(self, name: LinkName, key: ShipmentKey, now: float) -> None:
        """A transfer that may calls a lender; of one that was left alone it decides."""
        _, link = self._record(name)
        if link.standing is Standing.QUARANTINED:
            link.standing = Standing.ON_TRIAL
        self.opens(name, key, now)

    def landed(self, name: LinkName, num_cells: int, num_bad: int, now: float) -> list[Quarantined]:
        """A chunk has come. Returns what is left alone from now on: the wire, and the worker."""
        peer, link = self._record(name)
        link.rate.add(now, num_cells, num_bad)
        link.num_clean += num_cells - num_bad
        if link.standing is Standing.QUARANTINED or not num_bad:
            return []
        config = self._config
        sound = link.standing is Standing.SOUND
        if sound and not link.rate.exceeds(config.max_damage_share, config.forgiven_chunks):
            return []
        again = "" if sound else ", tried again"
        link.sentence.pass_(now, f"{link.rate} over {name.wire}{again}")
        link.standing, link.trial = Standing.QUARANTINED, None
        found = [_quarantined(name.worker, peer, name.wire, link.left_s(now), now, link)]
        if len(bad := peer.bad_wires) >= config.suspect_wires and peer.sentence.until <= now:
            reason = f"cells came damaged over {' and '.join(bad)}, the last: {link.rate}"
            peer.sentence.pass_(now, reason)
            left_s = peer.sentence.until - now
            found.append(_quarantined(name.worker, peer, "", left_s, now))
        return found

    def ended(self, name: LinkName, key: ShipmentKey, committed: bool) -> bool:
        """A transfer over the link is over. Returns whether it has cleared it."""
        _, link = self._record(name)
        if link.standing is not Standing.ON_TRIAL or link.trial != key:
            return False
        link.trial = None
        if not committed or not link.num_clean:
            return False
        link.standing = Standing.SOUND
        link.rate.clear()
        return True

    def over(self, key: ShipmentKey) -> None:
        """Of a transfer that is over: what it was to decide and did not, as it went on over another
        link, the next one does.
        """
        for link in self._trials.pop(key, ()):
            if link.trial == key:
                link.trial = None

    def standing(self, now: float) -> list[Quarantined]:
        """All that is left alone now; of several ranks' links over one wire, the longest."""
        found: dict[tuple[str, str], Quarantined] = {}
        for worker, peer in self._peers.items():
            if (left_s := peer.sentence.until - now) > 0:
                found[worker, ""] = _quarantined(worker, peer, "", left_s, now)
            for (_, wire), link in peer.links.items():
                left_s = link.left_s(now)
                before = found.get((worker, wire))
                if left_s > 0 and (before is None or before.left_s < left_s):
                    found[worker, wire] = _quarantined(worker, peer, wire, left_s, now, link)
        return list(found.values())

    def links(self) -> Iterator[tuple[LinkName, LinkRecord]]:
        """Every link that anything was ever heard over, until its worker's next life."""
        for worker, peer in self._peers.items():
            for (rank, wire), link in peer.links.items():
                yield LinkName(worker, peer.epoch, rank, wire), link

    def workers(self, now: float) -> dict[str, float]:
        """How long each prefill worker is to be left alone as such; 0: it is not."""
        return {worker: max(0.0, peer.sentence.until - now) for worker, peer in self._peers.items()}

    def _record(self, name: LinkName) -> tuple[PeerRecord, LinkRecord]:
        peer = self._peers.get(name.worker)
        if peer is not None and peer.epoch > name.epoch:
            peer = PeerRecord(name.epoch, self._sentence())  # an ended life: nobody remembers it
        elif peer is None or peer.epoch < name.epoch:
            peer = self._peers[name.worker] = PeerRecord(name.epoch, self._sentence())
            if len(self._peers) > self._config.max_remembered:
                self._peers.popitem(last=False)
        place = (name.rank, name.wire)
        if place not in peer.links:
            rate = DamageRate(self._config.damage_window_s)
            peer.links[place] = LinkRecord(rate, self._sentence())
        return peer, peer.links[place]

    def _sentence(self) -> Sentence:
        return Sentence(self._config.cool_down_s, self._config.max_cool_down_s)


def _quarantined(
    worker: str,
    peer: PeerRecord,
    wire: str,
    left_s: float,
    now: float,
    link: LinkRecord | None = None,
) -> Quarantined:
    sentence = link.sentence if link is not None else peer.sentence
    reason = link.reason if link is not None else sentence.reason
    return Quarantined(worker, peer.epoch, wire, now - sentence.since, left_s, reason)
