"""`kvferry ask` and `kvferry chat`: text in, streamed text out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from kvferry.client import Answer, RouterClient, chat_request
from kvferry.errors import CommandError
from kvferry.explain import explain_table
from protos.inference_pb2 import ChatMessage


@dataclass(frozen=True, slots=True)
class Door:
    """Where a router listens, and a key it accepts."""

    address: str
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Manner:
    """How to answer, and whether to show the journey."""

    max_tokens: int
    temperature: float
    seed: int | None
    explain: bool


async def ask_once(
    door: Door, question: str, system: str | None, manner: Manner, console: Console
) -> None:
    async with RouterClient(door.address, door.api_key) as router:
        await _turn(router, [*_opening(system), _message("user", question)], manner, console)


def converse(door: Door, system: str | None, manner: Manner, console: Console) -> None:
    """Question and answer until end of input. Ctrl-C ends an answer, and at the prompt the talk."""
    console.print("[dim]/new starts over, /quit or Ctrl-D leaves[/]", highlight=False)
    with asyncio.Runner() as runner:
        router = runner.run(_connected(door))
        messages = _opening(system)
        try:
            while (text := console.input("[bold]>[/] ").strip()) != "/quit":
                if text == "/new":
                    messages = _opening(system)
                elif text:
                    messages = _exchange(runner, router, messages, text, manner, console)
        except (EOFError, KeyboardInterrupt):
            console.print()
        finally:
            runner.run(router.close())


def _exchange(
    runner: asyncio.Runner,
    router: RouterClient,
    messages: list[ChatMessage],
    text: str,
    manner: Manner,
    console: Console,
) -> list[ChatMessage]:
    """The conversation after one more turn; as it was when the turn failed."""
    asked = [*messages, _message("user", text)]
    try:
        answer = runner.run(_turn(router, asked, manner, console))
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]")
        return messages
    except CommandError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return messages
    return [*asked, _message("assistant", answer.text)]


async def _turn(
    router: RouterClient, messages: Sequence[ChatMessage], manner: Manner, console: Console
) -> Answer:
    request = chat_request(
        messages,
        max_tokens=manner.max_tokens,
        temperature=manner.temperature,
        seed=manner.seed,
        explain=manner.explain,
    )
    answer = await router.ask(
        request,
        lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
    )
    console.print()
    if manner.explain:
        console.print(explain_table(answer))
    return answer


async def _connected(door: Door) -> RouterClient:
    """On the loop that will use it."""
    return RouterClient(door.address, door.api_key)


def _opening(system: str | None) -> list[ChatMessage]:
    return [] if system is None else [_message("system", system)]


def _message(role: str, content: str) -> ChatMessage:
    """Raises CommandError when the text is not valid UTF-8 (the shell passed raw bytes)."""
    try:
        return ChatMessage(role=role, content=content)
    except (UnicodeEncodeError, ValueError):
        raise CommandError("the text is not valid UTF-8: check the terminal's encoding") from None
