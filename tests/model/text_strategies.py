"""Random text for property tests."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st

unhurried = settings(deadline=None)  # the first example loads a vocabulary

# SmolLM2's vocabulary has no token for these bytes; like every reader of it, we drop them.
UNKNOWN_TO_SMOLLM2 = "\x04\x06\x13\x14\x16\x1d"

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

# Bytes F1 and F2, which begin the planes 4 to 11 (nothing is assigned there), are unknown too.
smollm2_text = st.text(
    st.characters(exclude_categories=["Cs", "Cn"], exclude_characters=UNKNOWN_TO_SMOLLM2),
    max_size=40,
)


@st.composite
def cut_up(draw: st.DrawFn, whole: str) -> list[str]:
    """The same text in pieces, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    ends = [0, *cuts, len(whole)]
    return [whole[start:stop] for start, stop in pairwise(ends)]
