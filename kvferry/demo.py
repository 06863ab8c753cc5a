"""`kvferry demo`: start a cluster, ask it three questions, show where each one went, stop.

The second and third question stand behind one long system prompt. The third must find its blocks
again: they are neither computed nor shipped a second time. It is pinned to the pair that has them,
for the policy might rightly let decode, which holds nearly all, go without prefill.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.client import Answer, RouterClient, chat_request
from kvferry.cluster import running_cluster
from kvferry.explain import explain_table, size
from kvferry.redis_server import free_port
from kvferry.settings import Settings, load
from kvferry.up import Progress, cancelled_by_signals
from protos.inference_pb2 import ChatMessage, Pins

FIRST_QUESTION = "What is the capital of France?"
SHARED_QUESTIONS = ("How long does the crossing take?", "Who decides whether the ship sails?")
SYSTEM_PROMPT = """\
You answer the questions of passengers of the Northern Ferry, a small ship between the harbour \
of Alden and the island of Brae. Answer in one short sentence, and only from what is written \
here.
The ferry sails every day of the year. In summer, from the first of May to the last of \
September, it leaves Alden at 7:00, 10:00, 13:00, 16:00 and 19:00, and it leaves Brae at 8:30, \
11:30, 14:30, 17:30 and 20:30. In winter, from October to April, it leaves Alden at 8:00, 12:00 \
and 16:00, and it leaves Brae at 9:30, 13:30 and 17:30. The crossing takes 55 minutes. When the \
sea is rough it may take up to 80 minutes, and the captain alone decides whether the ship sails.
A ticket for a grown person costs 12 crowns, for a child under fourteen 6 crowns, and a child \
under four travels free. A bicycle costs 3 crowns, a motorcycle 9 crowns, and a car with its \
driver 38 crowns. A dog travels free on a lead and must stay on the open deck. Tickets are sold \
at the harbour office and on board; on board only cards are taken. A return ticket is valid for \
thirty days and costs twice the single fare less a tenth.
Cars must be at the harbour 30 minutes before the ship leaves, people on foot 10 minutes before. \
The cafe on the upper deck serves soup, bread, coffee and tea from the time the ship leaves \
until ten minutes before it arrives. There is a lift from the car deck to the upper deck, and \
the crew helps anyone who asks. Lost things are kept at the harbour office in Alden for one \
month."""


class Failure(Exception):
    """The demo ran, and showed something that must not be."""


async def demo(launcher: str | None, console: Console) -> bool:
    """Whether everything shown was as it must be. Raises CommandError when it does not come up."""
    clock = MonotonicClock()
    shown_well = False
    folder = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    with cancelled_by_signals():
        settings = _settings(folder, launcher)
        console.print(f"[bold]kvferry demo[/]  model {settings.model}", highlight=False)
        with console.status("starting") as status:
            progress = Progress(console, status)
            async with running_cluster(settings, progress, clock) as cluster:
                progress.done()
                async with RouterClient(cluster.record.grpc_address) as router:
                    shown_well = await _show(router, console)
                console.print("stopping", highlight=False)
    if shown_well:
        shutil.rmtree(folder)
    else:
        console.print(f"the logs are in {folder}/logs", highlight=False, soft_wrap=True)
    return shown_well


def _settings(folder: Path, launcher: str | None) -> Settings:
    ports = {"http_port": free_port(8000), "grpc_port": free_port(50051)}
    flags = {"state_dir": folder, "router": ports, "launcher": launcher}
    return load(flags={key: value for key, value in flags.items() if value is not None})


async def _show(router: RouterClient, console: Console) -> bool:
    try:
        first = await _ask(router, [_user(FIRST_QUESTION)], console)
        if "Paris" not in first.text:
            raise Failure("the first answer does not name Paris")
        system = ChatMessage(role="system", content=SYSTEM_PROMPT)
        second = await _ask(router, [system, _user(SHARED_QUESTIONS[0])], console)
        await _settled()
        pair = second.usage.journey
        pins = Pins(prefill=pair.prefill, decode=pair.decode)
        last = await _ask(router, [system, _user(SHARED_QUESTIONS[1])], console, pins)
        _judge_reuse(last, console)
    except Failure as failure:
        console.print(f"[red]✘[/] {failure}", highlight=False)
        return False
    return True


async def _settled() -> None:
    """Workers tell the index which blocks they hold with their next heartbeat, within a second."""
    await asyncio.sleep(1.5)


async def _ask(
    router: RouterClient,
    messages: Sequence[ChatMessage],
    console: Console,
    pins: Pins | None = None,
) -> Answer:
    behind = " (behind the shared system prompt)" if len(messages) > 1 else ""
    console.print(f"\n[bold]> {messages[-1].content}[/]{behind}", highlight=False)
    request = chat_request(messages, max_tokens=64, temperature=0.0, explain=True)
    if pins is not None:
        console.print("[dim](pinned to the same pair, so that what is shipped shows)[/]")
        request.pins.CopyFrom(pins)
    answer = await router.ask(request, lambda text: _print_piece(console, text))
    console.print("\n")
    console.print(explain_table(answer))
    return answer


def _print_piece(console: Console, text: str) -> None:
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def _judge_reuse(answer: Answer, console: Console) -> None:
    usage, journey = answer.usage, answer.usage.journey
    if usage.cached_tokens == 0:
        raise Failure("the last question reused nothing of the shared system prompt")
    lacking = journey.prompt_blocks - journey.decode_cached_blocks
    if journey.shipped_blocks > lacking:
        raise Failure(f"{journey.shipped_blocks} blocks shipped where decode lacked {lacking}")
    console.print(
        f"[green]✔[/] {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were not "
        f"computed again; of {journey.prompt_blocks} blocks decode held "
        f"{journey.decode_cached_blocks}, so "
        f"{journey.shipped_blocks} were shipped ({size(journey.shipped_bytes)})",
        highlight=False,
        soft_wrap=True,
    )


def _user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)
