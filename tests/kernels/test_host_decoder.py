import random
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.host_decoder import HostDecoder, Team, load
from kernels.paged_attention import EVERYTHING, Sight, paged_attention_reference

CONTEXTS = [1, 700, 65, 64, 33, 300, 256]
QUERIES = [1, 1, 65, 3, 33, 130, 1]  # the last of each context
MOST = 704  # tokens that a table has room for


@pytest.fixture(scope="module")
def kernel() -> HostDecoder:
    found = load()
    assert found is not None, "no C compiler"
    return found


@pytest.fixture(params=[1, 3])
def team(kernel: HostDecoder, request: pytest.FixtureRequest) -> Iterator[Team]:
    yield kernel.team(request.param)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("num_outputs", "width"), [(960, 576), (66, 7), (34, 72), (576, 1536)])
def test_a_product_is_torchs(
    kernel: HostDecoder, team: Team, num_outputs: int, width: int, paired: bool, narrow: bool
) -> None:
    weight_OI, bias_O = torch.randn(num_outputs, width), torch.randn(num_outputs)
    matrix, memory = kernel.lay_out(weight_OI, bias_O, paired=paired, narrow=narrow)
    if narrow:
        weight_OI = weight_OI.bfloat16().float()
    assert memory and torch.equal(kernel.rows(matrix, torch.arange(num_outputs)), weight_OI)
    for num_rows in (1, 2, 13, 47, 48, 200):
        x_TI = torch.randn(num_rows, width)
        expected = F.linear(x_TI, weight_OI, bias_O)
        torch.testing.assert_close(team.multiply(matrix, x_TI), expected, atol=1e-3, rtol=1e-4)
        if paired:
            gate, up = expected.chunk(2, dim=1)
            gated = team.multiply(matrix, x_TI, gated=True)
            torch.testing.assert_close(gated, F.silu(gate) * up, atol=1e-2, rtol=1e-3)


def test_narrow_weights_are_rounded_as_torch_rounds_them(kernel: HostDecoder) -> None:
    halfway = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -(1.0 + 2**-8), 3.4e38, 1e-40, 0.0])
    weight_OI = torch.cat((halfway, torch.tensor([torch.inf, -torch.inf, torch.nan])))[:, None]
    matrix, memory = kernel.lay_out(weight_OI, None, paired=False, narrow=True)
    rows_TI = kernel.rows(matrix, torch.arange(len(weight_OI)))
    expected = weight_OI.bfloat16().float()
    assert memory and torch.equal(rows_TI[:-1], expected[:-1]) and rows_TI[-1].isnan().all()


@pytest.mark.parametrize("narrow", [False, True])
def test_a_row_is_multiplied_alike_whatever_rows_and_threads_there_are(
    kernel: HostDecoder, narrow: bool
) -> None:
    matrix, memory = kernel.lay_out(torch.randn(300, 130), None, paired=False, narrow=narrow)
    x_TI = torch.randn(150, 130)
    whole = kernel.team(2).multiply(matrix, x_TI)
    alone = kernel.team(1)
    for start, stop in [(0, 1), (0, 16), (7, 20), (5, 46), (3, 120)]:
        assert torch.equal(alone.multiply(matrix, x_TI[start:stop]), whole[start:stop])
    assert memory


@pytest.mark.parametrize(
    ("num_query", "num_kv", "dim"),
    [(9, 3, 64), (4, 4, 64), (8, 1, 128), (6, 1, 80), (2, 1, 8), (5, 5, 256)],
)
def test_attention_is_the_references_and_paging_changes_no_bit(
    team: Team, kernel: HostDecoder, num_query: int, num_kv: int, dim: int
) -> None:
    kv = [torch.randn(2, num_kv, context, dim) for context in CONTEXTS]
    q_THD = torch.randn(sum(QUERIES), num_query, dim)
    first = attended(kernel.team(1), q_THD, kv, 16, fragmented=False, check=True)
    for block_size in (1, 8, 16, 32, 64, 128):
        for fragmented in (False, True):
            found = attended(team, q_THD, kv, block_size, fragmented=fragmented)
            assert torch.equal(found, first), f"blocks of {block_size}"


@pytest.mark.parametrize("sight", [Sight(1), Sight(100), Sight(300, 4), Sight(70, 90)])
@pytest.mark.parametrize(("num_query", "num_kv", "dim"), [(9, 3, 64), (6, 1, 80)])
def test_attention_through_a_window_is_the_references_and_paging_changes_no_bit(
    team: Team, kernel: HostDecoder, num_query: int, num_kv: int, dim: int, sight: Sight
) -> None:
    kv = [torch.randn(2, num_kv, context, dim) for context in CONTEXTS]
    q_THD = torch.randn(sum(QUERIES), num_query, dim)
    first = attended(kernel.team(1), q_THD, kv, 16, fragmented=False, check=True, sight=sight)
    for block_size in (1, 64):
        found = attended(team, q_THD, kv, block_size, fragmented=True, sight=sight)
        assert torch.equal(found, first), f"blocks of {block_size}"


@pytest.mark.parametrize(("sight", "unread"), [(Sight(70), (0, 512)), (Sight(200, 3), (64, 384))])
def test_blocks_between_the_sinks_and_every_window_are_not_read(
    team: Team, sight: Sight, unread: tuple[int, int]
) -> None:
    pool_NPHSD = torch.randn(41, 2, 3, 16, 64)
    q_THD = torch.randn(51, 6, 64)
    spans = torch.tensor([0, 50, 51]), torch.tensor([650, 650])
    arguments = (*spans, torch.arange(41).repeat(2, 1), 0.125, sight)
    found = team.attention(q_THD, pool_NPHSD, *arguments)
    pool_NPHSD[unread[0] // 16 : unread[1] // 16] = torch.nan
    assert found.isfinite().all()
    assert torch.equal(team.attention(q_THD, pool_NPHSD, *arguments), found)


def attended(
    team: Team,
    q_THD: Tensor,
    kv: Sequence[Tensor],
    block_size: int,
    *,
    fragmented: bool,
    check: bool = False,
    sight: Sight = EVERYTHING,
) -> Tensor:
    """Through a pool whose unused slots are NaN, with planes outside of blocks if fragmented."""
    num_blocks = [-(-context // block_size) for context in CONTEXTS]
    _, num_kv, _, dim = kv[0].shape
    shape = (sum(num_blocks) + 3, 2, num_kv, block_size, dim)
    pool_NPHSD = torch.full(shape, torch.nan)
    numbers = list(range(shape[0]))
    if fragmented:
        random.Random(block_size).shuffle(numbers)
        pool_NPHSD = pool_NPHSD.permute(1, 0, 3, 2, 4).contiguous().permute(1, 0, 3, 2, 4)
    tables_SB = torch.zeros(len(kv), -(-MOST // block_size), dtype=torch.int64)
    for s, kv_PHCD in enumerate(kv):
        for index in range(num_blocks[s]):
            tables_SB[s, index] = block = numbers.pop()
            part = kv_PHCD[:, :, index * block_size :][:, :, :block_size]
            pool_NPHSD[block, :, :, : part.shape[2]] = part
    starts_S1 = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()])
    arguments = (q_THD, pool_NPHSD, starts_S1, torch.tensor(CONTEXTS), tables_SB, dim**-0.5, sight)
    found = team.attention(*arguments)
    if check:
        expected = paged_attention_reference(*arguments)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    return found


@pytest.mark.parametrize("sight", [EVERYTHING, Sight(90, 5)])
def test_chunks_attend_as_the_whole_prompt_does(team: Team, sight: Sight) -> None:
    pool_NPHSD = torch.randn(20, 2, 3, 16, 64)
    q_THD = torch.randn(300, 9, 64)
    tables_SB = torch.arange(20)[None]

    def attend(start: int, stop: int) -> Tensor:
        spans = torch.tensor([0, stop - start]), torch.tensor([stop])
        return team.attention(q_THD[start:stop], pool_NPHSD, *spans, tables_SB, 0.125, sight)

    whole = attend(0, 300)
    for start, stop in [(0, 64), (64, 67), (67, 300)]:
        assert torch.equal(attend(start, stop), whole[start:stop])


def test_nan_in_a_key_reaches_every_query_that_sees_it_and_no_other(team: Team) -> None:
    pool_NPHSD = torch.randn(4, 2, 1, 16, 64)
    pool_NPHSD[1, 0, 0, 4, 7] = torch.nan  # token 20
    q_THD = torch.randn(60, 2, 64)
    spans = torch.tensor([0, 59, 60]), torch.tensor([59, 20])
    out = team.attention(q_THD, pool_NPHSD, *spans, torch.arange(4).repeat(2, 1), 0.125)
    seen = torch.tensor([20 <= query < 59 for query in range(60)])
    assert torch.equal(out.isnan().any(-1).any(-1), seen)
