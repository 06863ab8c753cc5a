"""What README.md tells people to type is what the program takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from kvferry.cli import app
from kvferry.settings import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    text = README.replace("\\\n", " ")
    return re.findall(r"^\.venv/bin/kvferry (.+?)(?: +#.*)?$", text, flags=re.MULTILINE)


def test_readme_opens_with_the_two_commands() -> None:
    assert README.startswith("# kvferry\n\n```\nmake demo\nmake test\n```\n")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        its_own = re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
        assert its_own or (ROOT / "bench" / f"{target.removeprefix('bench-')}.py").exists(), target


@pytest.mark.parametrize("command", commands())
def test_every_command_in_readme_parses(command: str) -> None:
    group = typer.main.get_command(app)
    arguments = shlex.split(command)
    context = group.make_context("kvferry", list(arguments))
    name, found, rest = group.resolve_command(context, arguments)  # type: ignore[attr-defined]
    with found.make_context(name, rest, parent=context) as parsed:
        flags = parsed.params.get("assign") or []
    assert all("=" in flag for flag in flags)


def test_readme_shows_all_commands_for_people() -> None:
    assert {command.split()[0] for command in commands()} >= {"up", "ask", "chat", "ps", "plan"}


def test_the_settings_file_in_readme_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "kvferry.yaml"
    path.write_text(example)
    settings = load(path)
    assert settings.decode.tp == 4
    assert settings.decode.model == "/models/Llama-3.1-8B-Instruct"
