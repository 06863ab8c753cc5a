"""Every kernel compiles for CUDA cards, which needs none, just as it is launched on one.

The launches outside of CI take minutes: `make test-timed ARGS=tests/kernels/test_compiles.py`.
"""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from kernels.launch import tl, triton
from tests.kernels.absent_card import SHARED_BYTES, Built, absent_card
from tests.kernels.launches import Heads, Launch, empty, launches

CARDS = {"Ampere": 80, "Ada": 89, "Hopper": 90}
MOVED = ("_gather_cells", "_scatter_cells", "_copy_blocks", "_rms_norm", "_silu_multiply")
LAUNCHES = list(launches())
on_each_card = pytest.mark.parametrize("card", ["Ampere", "Hopper"])


def built_for(card: str, launch: Launch) -> list[Built]:
    with absent_card(CARDS[card]) as absent:
        launch.call()
    for program in absent.built:
        assert program.shared_bytes <= SHARED_BYTES[absent.capability], program.name
    return absent.built


@on_each_card
@pytest.mark.parametrize(
    "launch", [each for each in LAUNCHES if each.in_ci], ids=lambda it: it.name
)
def test_what_is_launched_compiles_and_fits_the_card(card: str, launch: Launch) -> None:
    assert built_for(card, launch)


@pytest.mark.timed
@on_each_card
@pytest.mark.parametrize(
    "launch", [each for each in LAUNCHES if not each.in_ci], ids=lambda it: it.name
)
def test_whatever_else_is_launched_does_so_too(card: str, launch: Launch) -> None:
    assert built_for(card, launch)


def test_every_kernel_is_launched() -> None:
    folder = Path(__file__).parents[2] / "kernels"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    with absent_card(CARDS["Hopper"], compiles=False) as card:
        for launch in LAUNCHES:
            launch.call()
    assert {each.name for each in card.built} == set(
        re.findall(r"^ +(_\w+)\[.*\]\($", sources, re.M)
    )


@on_each_card
def test_what_moves_memory_moves_16_bytes_a_thread(card: str) -> None:
    moving = [each for each in LAUNCHES if each.in_ci and "int8" not in each.name]
    found = set()
    for launch in (each for each in moving if each.name.startswith(("copies", "norm"))):
        for built in built_for(card, launch):
            if built.name in MOVED:
                assert "ld.global.v4.b32" in built.ptx and "st.global.v4.b32" in built.ptx, launch
                found.add(built.name)
    attention = f"paged_attention {Heads()} torch.bfloat16"
    for launch in (
        each for each in moving if each.name in (f"{attention} decode", f"{attention} prompt")
    ):
        built = built_for(card, launch)[0]
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+),", built.ptx)
        assert copies and set(copies) == {"0x10"}, launch
        assert re.search(r"wgmma|mma\.sync", built.ptx)
        found.add(built.name)
    assert found == {*MOVED, "_paged_attention"}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("news", ["decode", "prompt"])
def test_attention_in_bf16_keeps_its_sums_in_registers(card: str, news: str) -> None:
    name = f"paged_attention {Heads()} torch.bfloat16 {news}"
    (launch,) = (each for each in LAUNCHES if each.name == name)
    assert [built.stack_bytes() for built in built_for(card, launch)] in ([0], [0, 0])


@triton.jit
def _of_a_length_no_card_has(x):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, 3), 0)


def test_what_only_the_interpreter_would_take_is_refused() -> None:
    with absent_card(CARDS["Hopper"]), pytest.raises(Exception, match="power of 2"):
        _of_a_length_no_card_has[(1,)](empty(3))
