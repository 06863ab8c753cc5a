"""The block book of one process, replayed row by row."""

from collections import Counter
from collections.abc import Callable

from kvcache.ledger_row import Account, Reason, TransferKey
from kvferry.audit.report import Rule

Say = Callable[..., None]
_MORE = {Reason.TAKEN, Reason.REVIVED, Reason.SHARED, Reason.FORKED}
_LAST_OWNER = {Reason.RELEASED, Reason.KEPT}


class BlockBook:
    """Where each block is and how many own it, by the rows alone."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._account: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._bound: dict[int, dict[TransferKey, int]] = {}  # READ or WRITE, until the end
        self._of: dict[TransferKey, list[int]] = {}
        self._unconfirmed: set[TransferKey] = set()
        self._fetched: dict[int, TransferKey] = {}  # written by a fetch, and not said to be kept
        self._pins: Counter[int] = Counter()  # that are lent from
        self.num_promised = 0
        self.num_rotten = 0  # found changed since they were cached

    @property
    def num_blocks(self) -> int:
        return len(self._account)

    def counts(self) -> Counter[int]:
        return Counter(self._account.values())

    def move(self, source: int, target: int, reason: int, first: int, count: int, n: int) -> None:
        if reason == Reason.COUNTED:
            found = sum(account == source for account in self._account.values())
            if found != count:
                name = Account(source).name
                what = f"the pool counts {count} blocks {name}, the books say {found}"
                self._say(Rule.COUNT_DIFFERS, what)
            return
        if reason == Reason.ROTTEN:
            self.num_rotten += count
            return
        for block in range(first, first + count):
            if reason == Reason.OPENED and block in self._account:
                self._say(Rule.WRONG_ACCOUNT, "it was there already", block=block)
            if reason in (Reason.OPENED, Reason.FORWARD):
                self._account[block] = target
                self._owners[block] = n if reason == Reason.FORWARD else 0
            else:
                self._move(source, target, reason, block)

    def promise(self, target: int, count: int) -> None:
        if target == Account.PROMISED:
            self.num_promised += count
            return
        if count > self.num_promised:
            what = f"{count} blocks taken up where {self.num_promised} were promised"
            self._say(Rule.PROMISE_BROKEN, what)
        self.num_promised = max(0, self.num_promised - count)

    def bind(self, key: TransferKey, reason: int, first: int, count: int) -> None:
        for block in range(first, first + count):
            account = self._account.get(block)
            if self._account and account != Account.IN_USE:
                rule = _freed_under(reason)
                where = "nowhere" if account is None else Account(account).name
                self._say(rule, f"it is bound while it is {where}", transfer=key, block=block)
            holders = self._bound.setdefault(block, {})
            if reason == Reason.WRITE:
                for other, how in holders.items():
                    if how == Reason.WRITE and other != key:
                        what = f"transfer {other} writes it, too"
                        self._say(Rule.WRITTEN_BY_TWO, what, transfer=key, block=block)
            holders[key] = reason
            if key.is_fetch and reason == Reason.WRITE:
                self._fetched[block] = key
            self._of.setdefault(key, []).append(block)

    def keep(self, first: int, count: int) -> None:
        """These blocks of a fetch are whole on every rank, it says."""
        for block in range(first, first + count):
            self._fetched.pop(block, None)

    def pin(self, reason: int, first: int, count: int) -> None:
        """Blocks are lent from, or are no more."""
        for block in range(first, first + count):
            if reason == Reason.UNPINNED:
                self._pins[block] -= self._pins[block] > 0  # its PINNED may be on a page that went
                continue
            self._pins[block] += 1
            if self._account and (account := self._account.get(block)) != Account.IN_USE:
                where = "nowhere" if account is None else Account(account).name
                what = f"it is lent from while it is {where}"
                self._say(Rule.FREED_UNDER_LOAN, what, block=block)

    def await_ranks(self, key: TransferKey) -> None:
        """This rank has ended the transfer; others have not confirmed that they have."""
        self._unconfirmed.add(key)

    def unbind(self, key: TransferKey) -> None:
        self._unconfirmed.discard(key)
        for block in self._of.pop(key, ()):
            self._bound[block].pop(key, None)

    def _move(self, source: int, target: int, reason: int, block: int) -> None:
        account, owners = self._account.get(block), self._owners.get(block, 0)
        if account is None:
            self._say(Rule.UNKNOWN_BLOCK, f"the pool has {self.num_blocks} blocks", block=block)
            return
        if account != source:
            self._misplaced(account, source, reason, block)
        elif reason in _LAST_OWNER and owners != 1:
            self._say(Rule.FREED_WHILE_OWNED, f"it has {owners} owners", block=block)
        elif reason == Reason.LET_GO and owners < 2:
            self._say(Rule.FREED_TWICE, f"it has {owners} owners, and stays in use", block=block)
        if account == Account.IN_USE and target != Account.IN_USE:
            for key, how in self._bound.get(block, {}).items():
                rule = _freed_under(how)
                if key in self._unconfirmed:
                    rule = Rule.FREED_UNCONFIRMED
                self._say(rule, f"it goes {Reason(reason).name}", transfer=key, block=block)
            if self._pins[block]:
                what = f"it goes {Reason(reason).name}, {self._pins[block]} calls read it"
                self._say(Rule.FREED_UNDER_LOAN, what, block=block)
            fetch = self._fetched.pop(block, None)
            if fetch is not None and target == Account.CACHED:
                what = "it goes KEPT, and is not among those that came whole"
                self._say(Rule.KEPT_UNFETCHED, what, transfer=fetch, block=block)
        self._account[block] = target
        if target != Account.IN_USE:
            self._owners[block] = 0
        elif source != Account.IN_USE:
            self._owners[block] = 1
        else:
            self._owners[block] = owners + (1 if reason in _MORE else -1)

    def _misplaced(self, account: int, source: int, reason: int, block: int) -> None:
        if account == Account.IN_USE and reason in (Reason.TAKEN, Reason.REVIVED):
            rule = Rule.OWNED_TWICE
        elif account != Account.IN_USE and source == Account.IN_USE:
            rule = Rule.FREED_TWICE
        else:
            rule = Rule.WRONG_ACCOUNT
        what = f"{Reason(reason).name} from {Account(source).name}, but it is "
        self._say(rule, what + Account(account).name, block=block)


def _freed_under(how: int) -> Rule:
    return Rule.FREED_UNDER_WRITER if how == Reason.WRITE else Rule.FREED_UNDER_READER
