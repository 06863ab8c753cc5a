"""What the routing decision is about: replicas, the prompt, the ways to serve it and their costs.

A way is a (prefill, decode) pair or decode alone; `router.policy` chooses one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from router.curves import INSTANT, LinkCurve
from router.targets import NO_TARGETS, Targets

LEAST_IDLE = 0.1  # of the time; where the queues only grow, no mean is finite


# Nobody changes one. A frozen one takes 9 us to make, this one 2, and a decision makes one for each
# worker.
@dataclass(slots=True)
class Replica:
    """What the decision needs to know of one live worker, at one moment."""

    name: str
    ms_per_token: float  # to compute a prompt, queue excluded
    block_size: int  # tokens; blocks are its own wherever they are counted here
    queued_tokens: int = 0  # prompt tokens ahead
    queued_ms: float | None = None  # what they take; None: by tokens
    busier: int = 0  # than others of its role, lately: who is less so wins where costs are equal
    prompt_ms: float = 0.0  # besides, for each prompt
    look_ms: float = 0.0  # and for each pair of a token to compute and one before it
    dispatch_ms: float = 0.0
    matched_blocks: int = 0  # of this prompt, from its root
    # And those that it will hold when this prompt's turn comes, as far as we know: what it computes
    # before. Costs count on them; nothing is promised for them.
    expected_blocks: int = 0
    host_blocks: int = 0  # of the matched ones: in host memory, to be loaded back first
    running: int = 0  # sequences it is streaming
    waiting: int = 0  # requests that have not joined its batch
    step_ms: float = 0.0  # of one decode step
    joined_step_ms: float = 0.0  # of one with this prompt's sequence in it; 0: not known
    measured: bool = False  # whether its speed was, or is only what is usual
    free_blocks: int = 0
    total_blocks: int = 0
    wires: tuple[str, ...] = ()  # preferred first
    host: str = ""
    node: str = ""  # empty: not known, and so not far from any
    zone: str = ""
    naming: str = ""  # replicas of one naming and block size call equal blocks alike
    refused: str = ""  # why it cannot be used now

    @property
    def queue_ms(self) -> float:
        known = self.queued_ms
        return self.queued_tokens * self.ms_per_token if known is None else known

    def compute_ms(self, uncached_tokens: int, cached_tokens: int) -> float:
        """As `PrefillCurve.ms`."""
        looks = cached_tokens + uncached_tokens / 2
        return self.prompt_ms + uncached_tokens * (self.ms_per_token + self.look_ms * looks)

    @property
    def matched_tokens(self) -> int:
        return self.matched_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks their KV fills, the partial one included."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as the policy sees it. `key` is any digest of its tokens; it breaks ties."""

    num_tokens: int
    token_bytes: int  # KV of one token, over all layers and heads
    num_layers: int
    key: bytes = b""
    output_tokens: float = 0.0  # that are expected
    targets: Targets = NO_TARGETS
    session: tuple[str, str] | None = None  # the (prefill, decode) its session was at last
    left_ms: float = inf  # for the first token; what has no usable way within it is refused

    def uncached_tokens(self, replica: Replica) -> int:
        """Tokens that will be left for it to compute; the last one always is."""
        matched, expected = replica.matched_blocks, replica.expected_blocks
        if not (matched or expected):
            return self.num_tokens
        return self.num_tokens - self._reusable_tokens(replica, max(matched, expected))

    def fetched_tokens(self, replica: Replica, holder: Replica) -> int:
        """Tokens of these that it could have from a holder instead."""
        return max(0, self.uncached_tokens(replica) - self.num_tokens + self.held_tokens(holder))

    def held_tokens(self, replica: Replica) -> int:
        """Tokens that it need not compute, as far as the index knows."""
        return self._reusable_tokens(replica, replica.matched_blocks)

    def _reusable_tokens(self, replica: Replica, num_blocks: int) -> int:
        return min(num_blocks, (self.num_tokens - 1) // replica.block_size) * replica.block_size

    def compute_ms(self, replica: Replica, fetched_tokens: int = 0) -> float:
        uncached = self.uncached_tokens(replica) - fetched_tokens
        return replica.compute_ms(uncached, self.num_tokens - uncached)

    def host_bytes(self, replica: Replica) -> int:
        """What it holds of the prompt in host memory."""
        return replica.host_blocks * replica.block_size * self.token_bytes

    def shipped_bytes(self, prefill: Replica, decode: Replica) -> int:
        """What decode lacks, in blocks as large as the smaller of theirs."""
        unit = min(prefill.block_size, decode.block_size)
        whole_tokens = -(-self.num_tokens // unit) * unit
        return max(0, whole_tokens - decode.matched_tokens) * self.token_bytes


@dataclass(frozen=True, slots=True)
class Pins:
    """What the request itself prescribes; empty prescribes nothing."""

    prefill: str = ""
    decode: str = ""
    wire: str = ""
    no_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """What an operator may turn. Defaults are for replicas on one host or one fast network."""

    # Computing on decode delays every sequence it streams, and the one that will join meanwhile.
    interference: float = 1.0
    # What others will wait for this prompt's computing, against its own waiting.
    followers: float = 1.0
    # A second leg, a reservation and a commit: about ten gRPC messages of 0.5 ms.
    handoff_ms: float = 5.0
    # What each sequence more adds to a decode step, until the steps of its worker have a curve: 68
    # ms alone, 172 ms with sixteen (fp32, CPU).
    crowding: float = 0.1
    # Decode without room must first finish or evict somebody.
    full_pool_ms: float = 1000.0
    # What a client waits for each token of its answer, against its waiting for the first one.
    streaming: float = 1.0
    # What missing a target by a millisecond costs, for the first token or for all tokens together.
    lateness: float = 2.0
    # What a session's last worker may hold that nobody has announced yet: for each of the two.
    session_ms: float = 10.0
    # A shipment's round trips and contention on the way to another node, or out of the zone.
    node_ms: float = 1.0
    zone_ms: float = 10.0
    # Blocks in host memory are loaded back before the model computes: 16 GB/s, about PCIe 4 x16.
    host_bytes_per_ms: float = 16e6
    # Whether blocks may be fetched from who holds them instead of being computed.
    fetches: bool = True


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a pair, at one moment."""

    curve: LinkCurve = field(default_factory=LinkCurve)
    in_flight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks that prefill takes from their holder before it computes the rest."""

    holder: Replica
    num_blocks: int  # of the prompt, from its first
    num_tokens: int  # of them, those that prefill lacks
    num_bytes: int
    ms: float  # until they are there
    compute_ms: float  # of what is left
    saved_ms: float  # of computing


@dataclass(frozen=True, slots=True)
class Terms:
    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    link_ms: float = 0.0
    interference_ms: float = 0.0
    admission_ms: float = 0.0
    followers_ms: float = 0.0
    dispatch_ms: float = 0.0
    streaming_ms: float = 0.0
    lateness_ms: float = 0.0
    session_ms: float = 0.0
    distance_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Of the cost, what this prompt itself waits for its first token."""
        return self.queue_ms + self.fetch_ms + self.compute_ms + self.dispatch_ms

    @property
    def cost_ms(self) -> float:
        return sum(self.named().values())

    def named(self) -> dict[str, float]:
        return {
            "queue": self.queue_ms,
            "fetch": self.fetch_ms,
            "compute": self.compute_ms,
            "link": self.link_ms,
            "interference": self.interference_ms,
            "admission": self.admission_ms,
            "followers": self.followers_ms,
            "dispatch": self.dispatch_ms,
            "streaming": self.streaming_ms,
            "lateness": self.lateness_ms,
            "session": self.session_ms,
            "distance": self.distance_ms,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the prompt. `prefill` is None where decode computes it itself."""

    prefill: Replica | None
    decode: Replica
    wires: tuple[str, ...] = ()  # in the order in which they are to be tried
    terms: Terms = field(default_factory=Terms)
    refused: str = ""
    barred: bool = False  # refused for no more than the work ahead, which will be done
    late: bool = False  # refused because it would take too long
    fetch: Fetch | None = None  # None: what prefill does not hold is computed

    @property
    def wire(self) -> str:
        return self.wires[0] if self.wires else ""

    @property
    def computing(self) -> Replica:
        return self.prefill or self.decode

    def __str__(self) -> str:
        if self.prefill is None:
            return self.decode.name
        blocks = f" with blocks of {self.fetch.holder.name}" if self.fetch else ""
        return f"{self.prefill.name} to {self.decode.name}{blocks}"


@dataclass(frozen=True, eq=False)
class Decision:
    """`chosen` is None when every candidate is refused, or there is none.

    Then `barred` is the cheapest of those who only have too much ahead, and where there are none,
    `late` is one for each who would be too late. The list of all is made when somebody asks.
    """

    chosen: Candidate | None
    barred: Candidate | None
    late: tuple[Candidate, ...]
    num_computing: int  # replicas that could compute the prompt, now or after some wait
    list_all: Callable[[], list[Candidate]]
    why: Callable[[Sequence[Candidate]], str]

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The chosen one first, then the cheapest, the refused ones last."""
        chosen, listed = self.chosen, self.list_all()
        if chosen is None:
            return tuple(listed)
        return (chosen, *(each for each in listed if str(each) != str(chosen)))

    @cached_property
    def reason(self) -> str:
        return self.why(self.candidates)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The live workers at one moment, and what is known of the ways between them."""

    prefills: Sequence[Replica]
    decodes: Sequence[Replica]
    refused_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    untried: Link = field(default_factory=Link)  # what all other links are taken for
    fastest: LinkCurve = INSTANT  # no link takes less, whatever is on it
    prompts_per_ms: float = 0.0  # that come, to all of them together
    busy: float = 0.0  # how many prefill replicas they keep computing
    quarantined_wires: Mapping[tuple[str, str], Collection[str]] = field(default_factory=dict)
    # By (holder, prefill): the ways over which blocks are fetched. Where there is none, nothing is.
    fetches: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    fastest_fetch: LinkCurve = INSTANT  # no fetch takes less, whatever is on its link

    def followers(self, role: Sequence[Replica]) -> float:
        """Prompts that will come to one replica of `role` before what it has to do is done.

        Work that is added lengthens the busy period it falls into, by itself and by what comes
        meanwhile; whoever comes until its end waits that much longer. (A busy period that begins
        with work w lasts w / (1 - utilisation) in the mean: Kleinrock, Queueing Systems 1, 5.8.)
        Prompts to come are routed around a long queue as this one is, so that work anywhere is
        everybody's: the mean queue counts, not the replica's own.
        """
        if not role:
            return 0.0
        ahead_ms = sum(each.queue_ms for each in role) / len(role)
        own_ms = self.busy / self.prompts_per_ms if self.prompts_per_ms else 0.0
        idle = max(LEAST_IDLE, 1 - self.busy / max(1, len(self.prefills)))
        return self.prompts_per_ms / len(role) * (ahead_ms + own_ms / 2) / idle
