"""What an audit found: the rules that were broken, and what was counted while looking."""

from dataclasses import dataclass, field
from enum import Enum

from kvcache.ledger_row import Origin, TransferKey

MOST_SHOWN = 20  # one mistake breaks many rules


class Rule(Enum):
    """What always holds. Each is named by the sentence that a reader of a report sees."""

    ROWS_MISSING = "no row of a ledger is missing or there twice"
    MISENTERED = "a row's accounts are those of its reason"
    UNKNOWN_BLOCK = "a block belongs to the pool"
    WRONG_ACCOUNT = "what moves is where it moves from"
    OWNED_TWICE = "a block that is owned is not handed out"
    FREED_TWICE = "a block is let go by as many owners as it has"
    FREED_WHILE_OWNED = "a block with another owner stays in use"
    FREED_UNDER_WRITER = "a block stays in use while a transfer may write it"
    FREED_UNDER_READER = "a block stays in use while a transfer may read it"
    FREED_UNDER_LOAN = "a block stays in use while cells of it are lent by name"
    FREED_UNCONFIRMED = "a block stays in use until every rank has confirmed its fence"
    CONFIRMED_UNFENCED = "a rank that confirms its fence has ended by its own books"
    WRITTEN_BY_TWO = "a block is written by one transfer at a time"
    COUNT_DIFFERS = "the pool counts in each account what the books say"
    PROMISE_BROKEN = "no more is taken up than was promised"
    WRONG_STATE = "a transfer goes through its states in order, and ends once"
    MOVED_AFTER_END = "nothing moves after a transfer's end"
    TAKEN_AFTER_FAILURE = "nothing is taken from a transfer that was given up"
    FENCE_SKIPPED = "a transfer ends after every thread that reads or writes for it"
    INCOMPLETE = "a transfer is whole when each of its cells is in its place"
    BYTES_DIFFER = "what was written has as many bytes as the plan says"
    HEAD_TWICE = "each KV head comes from one rank"
    FOREIGN_EPOCH = "a row speaks of its own life"
    PLAN_DIFFERS = "both ends mean the same heads and blocks"
    NEVER_SENT = "what was written had been sent, as the same cells"
    NEVER_FETCHED = "what was fetched again had been sent again, or lent by a call"
    NEVER_LENT = "what was borrowed by a call had been lent, as the same cells"
    ACKED_UNWRITTEN = "what was acknowledged had been written"
    RELEASED_UNCOMMITTED = "prefill lets go of what decode has committed"
    COMMITTED_UNSEALED = "decode commits what prefill has sealed"
    RESENT_UNDAMAGED = "what is asked for again was damaged or lost"
    PARTIAL_GROUP = "a request is adopted when every rank has committed"
    KEPT_UNFETCHED = "what is kept of a fetch has come whole on every rank"
    NO_COUNTERPART = "what one end moved is in the other end's books"
    OPEN_AT_REST = "nothing is under way at rest"
    HELD_AT_REST = "no block is owned at rest"


@dataclass(frozen=True, slots=True)
class Broken:
    """One rule, and where it was broken."""

    rule: Rule
    origin: Origin
    seq: int  # of the row that broke it; 0 when it is a row that is not there
    what: str
    transfer: TransferKey | None = None
    layer: int | None = None
    block: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.rule.name}: {self.origin}"]
        if self.transfer is not None:
            parts.append(f"transfer {self.transfer}")
        if self.layer is not None and self.layer >= 0:
            parts.append(f"layer {self.layer}")
        if self.block is not None:
            parts.append(f"block {self.block}")
        where = f"row {self.seq}" if self.seq else "no row"
        return f"{', '.join(parts)}: {self.what} ({where}; rule: {self.rule.value})"


@dataclass(slots=True)
class Line:
    """One process's line in the table."""

    origin: Origin
    num_rows: int = 0
    num_blocks: int = 0
    blocks_in_use: int = 0
    transfers: int = 0
    completed: int = 0
    failed: int = 0
    still_open: int = 0
    fetches: int = 0
    cells: int = 0  # sent, or written
    num_bytes: int = 0
    repaired: int = 0  # chunks that were asked for again
    dropped: int = 0  # chunks that came and were not taken
    rotten: int = 0  # cached blocks that had changed, and were dropped


@dataclass(slots=True)
class Report:
    broken: list[Broken] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    proved: int = 0  # transfers whose both sides agree
    proved_fetches: int = 0  # whose cells are in the books of those who lent them, too
    one_sided: dict[TransferKey, str] = field(default_factory=dict)  # and which side is missing
    still_open: int = 0
    in_flight_lost: int = 0  # chunks sent that never came, in transfers that ended

    @property
    def whole(self) -> bool:
        return not self.broken

    def check(self) -> None:
        """Raise AssertionError that names the first broken rules."""
        shown = [str(broken) for broken in self.broken[:MOST_SHOWN]]
        assert self.whole, "\n".join([f"{len(self.broken)} broken rules:", *shown])

    def rules(self) -> set[Rule]:
        return {broken.rule for broken in self.broken}
