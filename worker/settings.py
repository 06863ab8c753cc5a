"""What prefill and decode workers are told at start, checked once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from kvcache.layout import KvLayout
from model.weight_form import WeightForm
from transport.faults import FaultSpec
from transport.host_name import checked_host

WireName = Literal["shm", "tcp", "grpc", "gloo", "nccl"]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Times = Annotated[int, Field(ge=0, le=1000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _listed(value: Any) -> Any:
    """`shm, tcp` as a list, which is how environments and flags like to say it."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


T = TypeVar("T")
Listed = Annotated[T, BeforeValidator(_listed)]


class WorkerSettings(BaseModel):
    """One worker: a tensor-parallel group of ranks under one name.

    `port` and `system_port` 0 let the system choose; the index tells the router what was chosen.
    Every rank listens on `host`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    ]
    model: str = "smollm2"
    tp: Count = 1
    device: Literal["cpu", "cuda"] = "cpu"
    # Where nothing else is asked for, bfloat16 on a card.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weights: WeightForm = "dense"  # all but `dense` on a CPU only
    # Of the first so many of the vocabulary, q, k and v of the first layer are computed at the
    # start and kept, in fp32: bench/known_tokens.py says what that takes and brings. On a CPU only.
    known_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    # Of each rank. 0: its share of the cores; `up` shares them among all ranks that it starts.
    threads: Annotated[int, Field(ge=0, le=1024)] = 0

    host: Annotated[str, AfterValidator(checked_host)] = "127.0.0.1"  # not of IPv6
    port: Port = 0
    system_port: Port = 0
    # Labels: shipping costs a little more between two nodes, and more between two zones.
    node: Annotated[str, Field(max_length=200)] = ""
    zone: Annotated[str, Field(max_length=200)] = ""
    redis_url: str = "redis://127.0.0.1:6380"
    key_prefix: Annotated[str, Field(min_length=1, max_length=32)] = "kvferry"

    # Neither need be the same on both sides of a transfer.
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128] = 16
    kv_layout: KvLayout = KvLayout.HEAD_MAJOR
    num_blocks: Annotated[int, Field(ge=2, le=10_000_000)] = 1024
    max_tokens_per_step: Count = 512
    max_running: Count = 32
    max_waiting: Count = 256

    # Of a pair's wires the first in the prefill worker's order is used: the fastest comes first.
    # shm counts only between workers on one host.
    wires: Listed[Annotated[tuple[WireName, ...], Field(min_length=1)]] = (
        "shm",
        "tcp",
        "gloo",
        "grpc",
    )
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    lease_s: Annotated[float, Field(gt=0, le=300)] = 5.0
    transfer_lease_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    # For a link to be made; a lost packet is sent again after 1 s, and after 3 s. (The group of a
    # gloo or nccl pair has 10 s, as has each of its messages.)
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    max_call_bytes: Count = 64 << 20  # of cells that one call may ask for, to repair others
    # When damage in what comes here is no accident: see `transport.quarantine`.
    damage_window_s: Seconds = 300.0  # in which a link's cells are counted, fading
    max_damage_share: Annotated[float, Field(gt=0, le=1)] = 1e-4  # of them; 1: no quarantine
    forgiven_chunks: Times = 3  # damaged in that time, that are not held against a link
    cool_down_s: Seconds = 60.0  # of the first quarantine; one soon after it lasts twice as long
    max_cool_down_s: Seconds = 3600.0
    rank_timeout_s: Annotated[float, Field(gt=0, le=600)] = 60.0  # a rank that has not started
    # A step that lasts longer has hung, and the worker ends, so that it is started again.
    step_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    drain_s: Annotated[float, Field(ge=0, le=600)] = 10.0  # what runs may finish at SIGTERM
    test_faults: str = ""  # for tests alone: what a prefill worker's wires do wrong

    # Of cached blocks, each time a prompt is about to share them: so many are digested again and
    # dropped if they have changed. 1: all of them; 0: none.
    recheck_share: Annotated[float, Field(ge=0, le=1)] = 1 / 64

    # Where every block and cell went, for `kvferry audit`: always in memory, the last pages of it.
    # In a folder it is there however the process ends.
    ledger_dir: Path | None = None
    ledger_pages: Annotated[int, Field(ge=2, le=100_000)] = 4  # of 1 MiB, a rank

    def any_transport(self) -> dict[str, Any]:
        """What a transport is told whichever the role: fields of a TransportConfig."""
        return {
            "lease_s": self.transfer_lease_s,
            "max_call_bytes": self.max_call_bytes,
            "damage_window_s": self.damage_window_s,
            "max_damage_share": self.max_damage_share,
            "forgiven_chunks": self.forgiven_chunks,
            "cool_down_s": self.cool_down_s,
            "max_cool_down_s": max(self.cool_down_s, self.max_cool_down_s),
        }

    @property
    def shows_pool(self) -> bool:
        """Whether processes of this host may be shown the pool, to read it."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _suit_device(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("device") == "cuda":
            return {"dtype": "bfloat16"} | dict(values)
        return values

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.port == self.system_port != 0:
            raise ValueError(f"port and system_port are both {self.port}: change one, or set 0")
        return self

    @model_validator(mode="after")
    def _check_wires(self) -> Self:
        if "nccl" in self.wires and self.device != "cuda":
            raise ValueError(f"the wire nccl needs device cuda, not {self.device}")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights != "dense" and self.device != "cpu":
            raise ValueError(f"weights {self.weights} need device cpu, not {self.device}")
        return self

    @field_validator("test_faults")
    @classmethod
    def _check_faults(cls, text: str) -> str:
        FaultSpec.parse(text)
        return text
