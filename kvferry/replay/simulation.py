"""One trace through the real router and index, with simulated workers, in virtual time.

Requests come when they are due, to each router in turn; `routing` takes them from there. What is
simulated is the time workers take.
"""

import asyncio
from collections.abc import Callable

from kvferry.errors import CommandError
from kvferry.replay.crew import Crew
from kvferry.replay.options import Options
from kvferry.replay.outcome import Decision, Failed, Outcome, Served
from kvferry.replay.rivals import picker
from kvferry.replay.routing import Routing
from kvferry.replay.speeds import at_load, zero_hit_ms
from kvferry.replay.trace import Arrival, Trace
from kvferry.replay.virtual_time import VirtualClock, run_virtual


def replay(
    trace: Trace,
    options: Options,
    progress: Callable[[], None] = lambda: None,
    enough: Callable[[Served | Failed], bool] = lambda _end: False,
) -> Outcome:
    """Serve all of `trace`, or until `enough` says so of a request that has ended; `progress` is
    called after each. Deterministic.
    """
    _refuse(trace, options)
    speeds = options.speeds
    if options.load is not None:
        trace = at_load(trace, speeds, options.num_replicas, options.load)
    load = zero_hit_ms(trace, speeds) / (options.num_replicas * 1000 * max(trace.duration_s, 1e-3))
    simulation = _Simulation(trace, options, progress, enough)
    ends = run_virtual(simulation.run())
    return Outcome(
        options.policy.value,
        tuple(end for end in ends if isinstance(end, Served)),
        tuple(end for end in ends if isinstance(end, Failed)),
        tuple(simulation.decisions),
        simulation.crew.work_ms(),
        simulation.ended_at,
        load,
    )


def _refuse(trace: Trace, options: Options) -> None:
    options.check()
    longest = max(each.num_tokens for each in trace.arrivals)
    if longest > options.cache_tokens:
        raise CommandError(
            f"a cache of {options.cache_tokens} tokens cannot hold the longest prompt, {longest}"
        )
    most = max(each.num_tokens + each.output_tokens for each in trace.arrivals)
    if most + trace.block_tokens > options.decode_tokens:
        raise CommandError(
            f"decode's {options.decode_tokens} tokens cannot hold the longest request, {most}"
        )


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        options: Options,
        progress: Callable[[], None],
        enough: Callable[[Served | Failed], bool],
    ) -> None:
        self._trace = trace
        self._options = options
        self._progress = progress
        self._enough = enough
        self._clock = VirtualClock()
        self._routers: list[Routing] = []
        self._tasks: list[asyncio.Task[Served | Failed]] = []
        self._stopped = False
        self.crew: Crew
        self.decisions: list[Decision] = []
        self.ended_at = 0.0

    async def run(self) -> tuple[Served | Failed, ...]:
        options, clock = self._options, self._clock
        self.crew = Crew(self._trace, options, clock)
        pick = picker(options.policy, options.seed)
        self._routers = [
            Routing(self._trace, options, clock, self.crew, pick, self.decisions)
            for _ in range(options.num_routers)
        ]
        await self.crew.start()
        tasks = [asyncio.create_task(router.follow()) for router in self._routers]
        for router in self._routers:
            await router.until_live(options.num_replicas + options.num_decodes)
        tasks += [asyncio.create_task(self.crew.suffer(fault)) for fault in options.faults]
        try:
            return await self._serve_all()
        finally:
            for router in self._routers:
                router.check()
            for task in tasks:
                task.cancel()
            await self.crew.stop()

    async def _serve_all(self) -> tuple[Served | Failed, ...]:
        """In the order in which they came; of a replay that was cut short, those that had ended."""
        start = self._clock.now()
        tasks = self._tasks
        for number, arrival in enumerate(self._trace.arrivals):
            await self._clock.sleep(max(0.0, start + arrival.at_s - self._clock.now()))
            if self._stopped:
                break
            tasks.append(asyncio.create_task(self._serve(number, arrival)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.ended_at = self._clock.now() - start
        return tuple(task.result() for task in tasks if not task.cancelled())

    async def _serve(self, number: int, arrival: Arrival) -> Served | Failed:
        router = self._routers[number % len(self._routers)]
        end = await router.serve(number, arrival)
        self._progress()
        if self._enough(end):
            self._stopped = True
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
        return end
