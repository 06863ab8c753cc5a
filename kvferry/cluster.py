"""A whole cluster on this machine, from Redis to the first answerable request.

1  the model file is read and the doors' ports are tried    nothing has been started yet
2  Redis                                                    given, found or bundled
3  router, prefill workers, decode groups, all at once      through the launcher
4  the router names a usable pair                           the cluster is up
5  stop: router, then workers, then Redis                   only what was started here
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.clock import Clock
from kvferry.client import RouterClient
from kvferry.errors import CommandError, PartFailed
from kvferry.launcher import Handle, Launcher, Part, PartEvent, PartState, Reporter, Role
from kvferry.local_launcher import LocalLauncher, Patience
from kvferry.ps import registered
from kvferry.redis_server import redis_server
from kvferry.settings import Settings, hide_password
from kvferry.state import ClusterRecord, only_cluster, write_record
from protos.inference_pb2 import GenerateRequest, TokenIds
from worker.cores import share, usable_cores


@dataclass(frozen=True, slots=True)
class Cluster:
    record: ClusterRecord
    handles: tuple[Handle, ...]

    def part(self, name: str) -> Handle:
        return next(handle for handle in self.handles if handle.part.name == name)


@asynccontextmanager
async def running_cluster(
    settings: Settings, report: Reporter, clock: Clock
) -> AsyncIterator[Cluster]:
    """Start everything, hand over the running cluster, stop everything. Raises CommandError."""
    with only_cluster(settings.state_dir):
        try_workers_ports(settings)
        _try_ports(settings)
        await asyncio.to_thread(_try_model, settings)
        redis_log = settings.state_dir / "logs" / "redis.log"
        report(PartEvent("redis", PartState.STARTING))
        asked = clock.now()
        async with redis_server(settings.redis_url, redis_log, clock, report=report) as place:
            report(PartEvent("redis", PartState.READY, clock.now() - asked, info=place.info))
            if place.pid is None:
                await _try_names(settings, place.url, clock)
            async with _running_parts(settings.with_redis(place.url), report, clock) as cluster:
                yield cluster
        if place.pid is not None:
            report(PartEvent("redis", PartState.STOPPED))


@asynccontextmanager
async def _running_parts(
    settings: Settings, report: Reporter, clock: Clock
) -> AsyncIterator[Cluster]:
    launcher = _launcher(settings, report, clock)
    handles: list[Handle] = []
    try:
        handles += await _start_all(launcher, _parts(settings))
        record = _record(settings, handles[0])
        await _wait_for_a_pair(record, settings.start_timeout_s)
        write_record(settings.state_dir, record)
        yield Cluster(record, tuple(handles))
    finally:
        for handle in handles:
            if handle.part.role is Role.ROUTER:
                await handle.stop()
        await launcher.stop()


def _launcher(settings: Settings, report: Reporter, clock: Clock) -> Launcher:
    patience = Patience(
        start=settings.start_timeout_s,
        stop=10 + max(settings.prefill.drain_s, settings.decode.drain_s),
    )
    local = LocalLauncher(settings.state_dir, report, clock, patience)
    if settings.launcher == "local":
        return local
    from kvferry.ray_launcher import RayLauncher

    return RayLauncher(settings.num_prefill, local, report, clock, patience)


def _parts(settings: Settings) -> list[Part]:
    """What runs on this machine; ranks that are told no number of threads share its cores."""
    threads = share(settings.num_ranks, usable_cores())
    prefill = [settings.prefill_worker(index, threads) for index in range(settings.num_prefill)]
    decode = [settings.decode_worker(index, threads) for index in range(settings.num_decode)]
    return [
        Part("router", Role.ROUTER, settings.router),
        *(Part(worker.name, Role.DECODE, worker) for worker in decode),
        *(Part(worker.name, Role.PREFILL, worker) for worker in prefill),
    ]


async def _start_all(launcher: Launcher, parts: list[Part]) -> list[Handle]:
    """Start the parts together; the first that fails ends the attempt."""
    tasks = [asyncio.create_task(launcher.start(part), name=part.name) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _wait_for_a_pair(record: ClusterRecord, timeout_s: float) -> None:
    """Ask the router where it would send a prompt until it names a prefill and a decode worker."""
    request = GenerateRequest(token_ids=TokenIds(ids=[0]))
    reason = "it has seen no worker"
    async with RouterClient(record.grpc_address, record.api_key) as router:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        pairs = (await router.explain(request)).candidates
                        if any(pair.prefill and pair.decode and not pair.refused for pair in pairs):
                            return
                        reasons = [pair.refused for pair in pairs if not pair.action]
                        reason = "; ".join(reasons) or reason
                    except CommandError as error:
                        reason = str(error)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise PartFailed(f"the router finds no pair of workers: {reason}") from None


def _record(settings: Settings, router: Handle) -> ClusterRecord:
    return ClusterRecord(
        pid=os.getpid(),
        model=settings.model,
        launcher=settings.launcher,
        grpc_address=router.info["grpc_address"],
        http_url=router.info["http_url"],
        redis_url=settings.redis_url,
        key_prefix=settings.key_prefix,
        api_key=next(iter(settings.router.api_keys), ""),
    )


def _try_ports(settings: Settings) -> None:
    router = settings.router
    for flag, port in (("--http-port", router.http_port), ("--grpc-port", router.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((router.host, port))
            except OSError as error:
                raise PartFailed(
                    f"port {port} of {router.host} cannot be used ({error.strerror}): "
                    f"stop what listens there or choose another with {flag}"
                ) from None


def try_workers_ports(settings: Settings) -> None:
    """Raises PartFailed for a port that two parts of a cluster on one host would listen on."""
    router = settings.router
    taken = {(router.host, port): "the router" for port in (router.grpc_port, router.http_port)}
    prefill = [("prefill", settings.prefill_worker(index)) for index in range(settings.num_prefill)]
    decode = [("decode", settings.decode_worker(index)) for index in range(settings.num_decode)]
    for role, worker in (*prefill, *decode):
        for field, port in (("port", worker.port), ("system_port", worker.system_port)):
            if port and (worker.host, port) in taken:
                raise PartFailed(
                    f"{taken[worker.host, port]} and {worker.name} would both listen on "
                    f"{worker.host}:{port}: set {role}.{field} to 0, and the system chooses"
                )
            taken[worker.host, port] = worker.name


async def _try_names(settings: Settings, redis_url: str, clock: Clock) -> None:
    """Two clusters with the same names in one index would fence each other's workers for ever.

    Workers of a cluster that was killed are there until their leases end.
    """
    wanted = {part.name for part in _parts(settings)}
    give_up = clock.now() + max(settings.prefill.lease_s, settings.decode.lease_s) + 1
    while taken := wanted & {
        each.name for each in await registered(redis_url, settings.key_prefix)
    }:
        if clock.now() > give_up:
            raise PartFailed(
                f"{', '.join(sorted(taken))} of another cluster live in {hide_password(redis_url)} "
                f"under key_prefix {settings.key_prefix}: stop that cluster, or give this one a "
                "--set key_prefix=NAME of its own"
            )
        await clock.sleep(0.2)


def _try_model(settings: Settings) -> None:
    """Read the model's metadata once, before five processes find out what is wrong with it."""
    from kvcache.head_map import HeadMap
    from model.errors import BadModelFile
    from model.source import open_model

    try:
        config = open_model(settings.model).config
    except BadModelFile as error:
        raise PartFailed(str(error)) from None
    for role, tp in (("prefill", settings.prefill.tp), ("decode", settings.decode.tp)):
        try:
            HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
        except ValueError as error:
            raise PartFailed(f"--{role}-tp {tp} does not fit {settings.model}: {error}") from None
