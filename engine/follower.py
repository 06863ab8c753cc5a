"""Ranks 1 and up: do what rank 0 says, until it says stop."""

from engine.recheck import recheck
from engine.runner import Runner, SliceObserver
from engine.step_plan import Kind, StepPlan
from kvcache.kv_store import KvStore
from model.comm import Comm
from model.model import Model


def run(model: Model, store: KvStore, comm: Comm, observer: SliceObserver | None = None) -> None:
    """Follow rank 0. Returns when it says stop; raises when it, or another rank, is gone."""
    assert comm.rank > 0, "rank 0 leads"
    runner = Runner(model, store, observer)
    while True:
        plan = StepPlan.decode(comm.broadcast_ints(None))
        if plan.kind is Kind.STOP:
            return
        if plan.kind is Kind.RUN:
            runner.run(plan)
        elif plan.kind is Kind.CHECK:
            recheck(store, comm, plan.checks)
