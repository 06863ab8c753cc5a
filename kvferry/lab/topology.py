"""Which nodes a lab has, and what each link between two of them is like.

Written as flags: `--nodes 3` or `--nodes prefill,decode`; `--link 1gbit,5ms` is every link,
`--link prefill-decode=200mbit,20ms,0.1%` one of them. Every pair of nodes has a link.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

from kvferry.errors import BadSettings

MAX_NODES = 16
NODE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?")  # `to-NAME` must fit an interface name
BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
PER_SECOND = {"us": 10**6, "ms": 10**3, "s": 1}

Direction = tuple[str, str]  # from one node to another


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction of a link."""

    rate_bits_per_s: float | None = None  # None: as fast as this machine can
    delay_s: float = 0.0  # one way
    loss: float = 0.0  # the share of packets that never arrive

    def __str__(self) -> str:
        rate = "unlimited" if self.rate_bits_per_s is None else _spell_rate(self.rate_bits_per_s)
        loss = f", {self.loss * 100:g}% lost" if self.loss else ""
        return f"{rate}, {self.delay_s * 1000:g} ms{loss}"


@dataclass(frozen=True, slots=True)
class Topology:
    nodes: tuple[str, ...]
    every_link: Shape = Shape()
    links: dict[frozenset[str], Shape] = field(default_factory=dict)  # those that differ

    def shape(self, one: str, other: str) -> Shape:
        return self.links.get(frozenset((one, other)), self.every_link)

    @property
    def pairs(self) -> Iterator[tuple[str, str]]:
        return combinations(self.nodes, 2)

    @property
    def directions(self) -> Iterator[Direction]:
        return permutations(self.nodes, 2)


def parse_topology(nodes: str, links: Sequence[str] = ()) -> Topology:
    """A topology as flags spell it. Raises BadSettings."""
    names = _parse_nodes(nodes)
    every_link, special = Shape(), dict[frozenset[str], Shape]()
    for link in links:
        ends, equals, shape = link.rpartition("=")
        if equals:
            special[frozenset(_parse_ends(ends, names))] = parse_shape(shape)
        else:
            every_link = parse_shape(shape)
    return Topology(names, every_link, special)


def parse_shape(text: str) -> Shape:
    """`RATE[,DELAY[,LOSS]]`, such as `1gbit,5ms,0.1%`. Raises BadSettings."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 3:
        raise BadSettings(f"a link is RATE,DELAY or RATE,DELAY,LOSS: {text!r}")
    return Shape(
        parse_rate(parts[0]),
        parse_delay(parts[1]) if len(parts) > 1 else 0.0,
        parse_loss(parts[2]) if len(parts) > 2 else 0.0,
    )


def parse_rate(text: str) -> float | None:
    if text == "unlimited":
        return None
    number, unit = _quantity(text)
    if unit not in BITS or number * BITS[unit] < 10_000:
        raise BadSettings(f"{text!r} is no rate: write 200mbit, 1gbit, or unlimited")
    return number * BITS[unit]


def parse_delay(text: str) -> float:
    number, unit = _quantity(text)
    if unit not in PER_SECOND or not 0 <= number / PER_SECOND[unit] <= 10:
        raise BadSettings(f"{text!r} is no delay: write 5ms or 200us, at most 10s")
    return number / PER_SECOND[unit]


def parse_loss(text: str) -> float:
    number, unit = _quantity(text)
    if unit != "%" or not 0 <= number <= 100:
        raise BadSettings(f"{text!r} is no loss: write a percentage, such as 0.5%")
    return number / 100


def _quantity(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-z]+)", text.strip())
    return (float(match[1]), match[2]) if match else (-1.0, "")


def _parse_nodes(text: str) -> tuple[str, ...]:
    if text.isdecimal():
        names = tuple("abcdefghijklmnop"[: int(text)])
        wanted = int(text)
    else:
        names = tuple(name.strip() for name in text.split(","))
        wanted = len(names)
    if not 2 <= wanted <= MAX_NODES:
        raise BadSettings(f"a lab has 2 to {MAX_NODES} nodes: {wanted} are asked for")
    for name in names:
        if not NODE_NAME.fullmatch(name):
            raise BadSettings(
                f"{name!r} cannot name a node: at most 12 small letters, digits and dashes"
            )
    if len(set(names)) != len(names):
        raise BadSettings(f"two nodes have the same name in {text!r}")
    return names


def _parse_ends(text: str, nodes: tuple[str, ...]) -> tuple[str, str]:
    """`a-b` as two known nodes; names may have dashes themselves."""
    cuts = [(text[:at], text[at + 1 :]) for at, char in enumerate(text) if char == "-"]
    known = [(a, b) for a, b in cuts if a in nodes and b in nodes and a != b]
    if len(known) != 1:
        raise BadSettings(f"{text!r} is no link between two of the nodes {', '.join(nodes)}")
    return known[0]


def _spell_rate(bits_per_s: float) -> str:
    unit, size = max(
        ((unit, size) for unit, size in BITS.items() if size <= bits_per_s),
        key=lambda known: known[1],
    )
    return f"{bits_per_s / size:g}{unit}"
