"""The largest logit of each row, against torch, over odd widths and what is no number."""

import pytest
import torch

from kernels.best_tokens import best_tokens, best_tokens_reference


@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 129, 1000])
def test_the_best_token_is_the_references_and_the_lowest_of_equals(width: int) -> None:
    logits_RV = torch.randn(9, 2 * width)[:, :width].round(decimals=1)
    logits_RV[3] = 0.5
    found, expected = best_tokens(logits_RV), best_tokens_reference(logits_RV)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    equal_RV = logits_RV == logits_RV.amax(-1, keepdim=True)
    assert torch.equal(found.best_R, equal_RV.long().argmax(-1)) and found.best_R[3] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 70, 99])
def test_a_row_that_is_not_finite_is_not_sane_and_its_neighbours_are(bad: float, at: int) -> None:
    logits_RV = torch.randn(3, 100)
    logits_RV[1, at] = bad
    found = best_tokens(logits_RV)
    assert found.sane_R.tolist() == [True, False, True]
    assert found.best_R.tolist()[::2] == logits_RV.argmax(-1).tolist()[::2]
    assert 0 <= found.best_R[1] < 100


def test_where_all_but_one_are_masked_that_one_is_possible_and_without_it_none() -> None:
    logits_RV = torch.full((2, 77), -torch.inf)
    logits_RV[0, 76] = -3.0
    found = best_tokens(logits_RV)
    assert found.best_R[0] == 76 and found.possible_R.tolist() == [True, False]
