"""What a router is told at start, checked once."""

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from transport.host_name import checked_host

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class RouterSettings(BaseModel):
    """Ports may be 0: the system then chooses, and `on_ready` says what it chose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2"  # a preset, a GGUF file, or a Hugging Face folder
    served_name: Annotated[str, Field(max_length=200)] = ""  # empty: the model's own name
    host: Annotated[str, AfterValidator(checked_host)] = "127.0.0.1"  # not of IPv6
    grpc_port: Port = 50051
    http_port: Port = 8000
    redis_url: str = "redis://127.0.0.1:6380"
    key_prefix: Annotated[str, Field(min_length=1, max_length=32)] = "kvferry"

    # Key to the identity it stands for. Empty: everyone is welcome and shares blocks.
    api_keys: dict[str, Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        default_factory=dict, repr=False
    )
    # System prompts, and what completions begin with, whose blocks all of them share.
    public_prompts: list[Annotated[str, Field(min_length=1, max_length=1 << 20)]] = Field(
        default_factory=list
    )
    max_prompt_bytes: Annotated[int, Field(ge=1, le=8 << 20)] = 1 << 20
    max_concurrent_requests: Count = 256
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    # For an HTTP client that has begun to say something: its headers, then its body.
    body_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    admission_wait_s: Seconds = 2.0  # for a first replica to appear
    # Work a worker may have ahead and still be given more; beyond, requests wait at the router.
    max_queue_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    max_waiting: Annotated[int, Field(ge=0)] = 128  # requests that wait there; 0: none may
    max_wait_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0  # to the first token, waiting
    # By identity: how much of a crowded cluster it gets, against the usual 1.
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(default_factory=dict)
    # Whether a prefill worker may take blocks from another that holds them, where that is quicker
    # than computing them.
    fetch_blocks: bool = True
    max_pair_attempts: Count = 3  # then decode computes the prompt itself
    doubt_s: Annotated[float, Field(gt=0, le=60)] = 2.0  # a worker that failed is left out
    drain_s: Seconds = 10.0  # what runs may finish at SIGTERM

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.grpc_port == self.http_port != 0:
            raise ValueError(f"grpc_port and http_port are both {self.http_port}: change one")
        return self
