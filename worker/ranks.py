"""The ranks of one worker's life, started and met by rank 0.

start    spawn the others; tell them the settings and whose life this is
load     every rank joins the group and loads its share, all at the same time
meet     each of the others says where it listens
lost     one of them has ended: the engine must fail everything now
"""

from engine.engine import Engine
from engine.rank_group import RankGroup
from model.comm import Comm
from model.source import ModelSource
from transport.orders import Identity
from worker.rank_parts import RankParts, build_rank, device_of, group_config
from worker.role import RoleSpec
from worker.settings import WorkerSettings

FRONT = "front"  # the note that says where rank 0 listens


class WorkerRanks:
    def __init__(self, spec: RoleSpec, settings: WorkerSettings, identity: Identity) -> None:
        self._settings = settings
        self._identity = identity
        self._group = RankGroup(group_config(settings), spec.rank_module, on_lost=self._on_lost)
        self._comm: Comm | None = None
        self.engine: Engine | None = None  # set as soon as there is one: it is told of losses
        self.addresses: tuple[str, ...] = ()  # of ranks 1 and up

    @property
    def comm(self) -> Comm:
        assert self._comm is not None, "the ranks have not met"
        return self._comm

    def start(self, source: ModelSource) -> RankParts:
        """Return rank 0's parts once all ranks are up. Raises RankLost, TimeoutError, OSError."""
        settings = self._settings
        self._group.start()
        self._group.publish(
            "life",
            {
                "settings": settings.model_dump(mode="json"),
                "instance": self._identity.instance,
                "epoch": self._identity.epoch,
            },
        )
        self._comm = self._group.connect(device_of(settings, 0))
        parts = build_rank(settings, source, self._comm)
        self.addresses = tuple(
            str(self._group.wait(f"address {rank}", settings.rank_timeout_s)["address"])
            for rank in range(1, settings.tp)
        )
        return parts

    def say_where(self, address: str) -> None:
        """The other ranks ask at this address for what rank 0 alone knows."""
        self._group.publish(FRONT, {"address": address})

    def lost(self) -> str | None:
        return self._group.lost()

    def stop(self, grace_s: float = 3.0) -> None:
        """End the others; they have `grace_s` to leave by themselves."""
        self._group.stop(grace_s)

    def _on_lost(self, reason: str) -> None:
        if self.engine is not None:
            self.engine.lose(reason)
