import pytest
import torch
from torch import Tensor

from kernels.paged_attention import paged_attention
from tests.kernels.samples import MEMORY_ORDERS, SHAPES, Paged, Shape, in_memory_order, paged

BLOCK_SIZES = [8, 16, 32, 64, 128]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def attention_as_written_in_books(sample: Paged) -> Tensor:
    """softmax(q k / sqrt(d)) v, one query and one head at a time, in double precision."""
    out = torch.empty(sample.q_THD.shape, dtype=torch.float64)
    starts = sample.query_starts_S1.tolist()
    for s, kv in enumerate(sample.kv_SPHCD):
        k, v = kv.double()
        num_queries = starts[s + 1] - starts[s]
        for i in range(num_queries):
            seen = k.shape[1] - num_queries + i + 1
            for head in range(out.shape[1]):
                kv_head = head * k.shape[0] // out.shape[1]
                q = sample.q_THD[starts[s] + i, head].double()
                weights = (k[kv_head, :seen] @ q * sample.scale).softmax(0)
                out[starts[s] + i, head] = weights @ v[kv_head, :seen]
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)],
)
def test_paged_attention_is_attention(name: str, dtype: torch.dtype, tolerance: float) -> None:
    sample = paged(SHAPES[name], 16, dtype)
    out = paged_attention(*sample.arguments)
    assert out.dtype == dtype and out.shape == sample.q_THD.shape
    want = attention_as_written_in_books(sample).to(dtype)
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_paging_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    unpaged = paged_attention(*paged(SHAPES[name], 128, dtype, fragmented=False).arguments)
    for block_size in BLOCK_SIZES:
        for fragmented in (True, False):
            sample = paged(SHAPES[name], block_size, dtype, fragmented=fragmented)
            assert torch.equal(paged_attention(*sample.arguments), unpaged), block_size


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("order", MEMORY_ORDERS)
def test_the_order_of_a_pools_memory_changes_no_bit(name: str, order: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, pool, starts, contexts, tables, scale = paged(SHAPES[name], 16, dtype).arguments
        usual = paged_attention(q, pool, starts, contexts, tables, scale)
        other = in_memory_order(pool, order)
        assert torch.equal(paged_attention(q, other, starts, contexts, tables, scale), usual)


@pytest.mark.parametrize("head_dim", [1, 3, 5, 7, 20, 33, 65, 80])
def test_paging_changes_no_bit_of_heads_that_fill_no_cache_line(head_dim: int) -> None:
    shape = Shape(3, 2, head_dim, ((50, 1), (131, 9), (257, 1)))
    unpaged = paged_attention(*paged(shape, 128, fragmented=False).arguments)
    for block_size in BLOCK_SIZES:
        assert torch.equal(paged_attention(*paged(shape, block_size).arguments), unpaged)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -3e38])
def test_slots_past_the_context_never_matter(name: str, filler: float) -> None:
    clean = paged_attention(*paged(SHAPES[name], 32, filler=0.0).arguments)
    dirty = paged_attention(*paged(SHAPES[name], 32, filler=filler).arguments)
    assert dirty.isfinite().all()
    assert torch.equal(dirty, clean)


def test_neighbours_in_the_batch_change_no_bit() -> None:
    together = Shape(3, 3, 64, ((40, 1), (300, 1), (129, 20), (129, 1)))
    sample = paged(together, 16)
    out = paged_attention(*sample.arguments)
    starts = sample.query_starts_S1
    for s in range(4):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        alone = paged_attention(
            sample.q_THD[rows],
            sample.pool_NPHSD,
            torch.tensor([0, rows.stop - rows.start]),
            sample.context_lens_S[s : s + 1],
            sample.block_tables_SB[s : s + 1],
            sample.scale,
        )
        assert torch.equal(out[rows], alone)


def test_two_sequences_may_share_the_blocks_of_their_common_prefix() -> None:
    sample = paged(Shape(2, 2, 16, ((48, 1), (48, 1))), 16)
    shared = sample.block_tables_SB.clone()
    shared[1] = shared[0]
    q_THD = sample.q_THD[:1].repeat(2, 1, 1)
    arguments = (q_THD, *sample.arguments[1:4], shared, sample.scale)
    out = paged_attention(*arguments)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(("query_head", "kv_head"), [(0, 0), (2, 0), (3, 1), (5, 1), (8, 2)])
def test_a_query_head_reads_the_kv_head_of_its_group(query_head: int, kv_head: int) -> None:
    sample = paged(Shape(3, 3, 16, ((20, 1), (9, 9))), 8)
    pool = sample.pool_NPHSD.clone()
    pool[:, 1] = torch.arange(3.0)[None, :, None, None]  # every value is its head's number
    out = paged_attention(sample.q_THD, pool, *sample.arguments[2:])
    torch.testing.assert_close(out[:, query_head], torch.full((10, 16), float(kv_head)))


def test_scores_far_below_zero_still_give_weights_that_add_up() -> None:
    sample = paged(Shape(1, 1, 16, ((200, 1), (5, 5))), 16)
    pool = sample.pool_NPHSD.clone()
    pool[:, 1] = 1.0
    arguments = (sample.q_THD * 1e4, pool, *sample.arguments[2:])
    torch.testing.assert_close(paged_attention(*arguments), torch.ones_like(sample.q_THD))


def test_a_poisoned_key_poisons_only_the_sequence_that_holds_it() -> None:
    sample = paged(Shape(1, 2, 16, ((20, 1), (20, 1), (20, 4))), 8)
    pool = sample.pool_NPHSD.clone()
    pool[int(sample.block_tables_SB[1, 0]), 0, 0, 3] = float("nan")
    out = paged_attention(sample.q_THD, pool, *sample.arguments[2:])
    clean = paged_attention(*sample.arguments)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3, 4, 5]], clean[[0, 2, 3, 4, 5]])


def test_integer_tables_of_32_bits_serve_as_well() -> None:
    sample = paged(SHAPES["chunks"], 16)
    q, pool, starts, contexts, tables, scale = sample.arguments
    narrow = paged_attention(q, pool, starts.int(), contexts.int(), tables.int(), scale)
    assert torch.equal(narrow, paged_attention(*sample.arguments))
