"""Products with packed weights: exact where they can be, and the same whoever computes them."""

import pytest
import torch
from torch import Tensor

from kernels import host_decoder, packed_linear
from kernels.packed_linear import (
    GROUP,
    PackedKernel,
    PackedMatrix,
    PackedRows,
    reference,
    reference_rows,
)

SHAPES = [(1, 1, 0), (16, 32, 0), (33, 70, 5), (48, 64, 31), (130, 257, 8)]  # O, I, skip
FORMS = [
    (bits, dtype, with_mins, parts)
    for bits in (8, 4)
    for dtype in (torch.float16, torch.float32)
    for with_mins in (False, True)
    for parts in (1, 2)
    if bits == 8 or (with_mins and parts == 1)
]
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 13, 16)


def kernel() -> PackedKernel:
    found = packed_linear.load()
    assert found is not None, "the compiler that make needs is used"
    return found


def all_instructions() -> list[PackedKernel]:
    best = kernel()
    return [PackedKernel(best.library, number) for number in range(best.instructions + 1)]


def matrix(
    shape: tuple[int, int, int], bits: int, dtype: torch.dtype, mins: bool, parts: int = 1
) -> PackedMatrix:
    num_outputs, width, skip = shape
    made = PackedMatrix.empty(num_outputs, width, bits, skip, dtype, mins, parts)
    codes = torch.randint(0, 256, (num_outputs, made.num_groups, GROUP * bits // 8))
    factors = torch.randn(2, num_outputs, made.num_groups * parts).to(dtype)
    made.fill(0, PackedRows(codes.byte(), factors[0], factors[1] if mins else None))
    return made


def product(made: PackedMatrix, x_TI: Tensor, by: PackedKernel | None = None) -> Tensor:
    by = by or kernel()
    return by.multiply(by.describe(made), x_TI, None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_all_instructions_give_the_same_bits_and_the_references_values(
    shape: tuple[int, int, int], form: tuple[int, torch.dtype, bool, int]
) -> None:
    torch.manual_seed(1)
    made = matrix(shape, *form)
    numbers = torch.randperm(shape[0])
    bias = torch.randn(shape[0])
    for by in all_instructions():
        described = by.describe(made)
        assert torch.equal(by.rows(described, numbers), reference_rows(made, numbers))
    for count in ROW_COUNTS:
        x = torch.randn(count, shape[1]) * 3
        outs = [by.multiply(by.describe(made), x, bias) for by in all_instructions()]
        assert all(torch.equal(outs[0], out) for out in outs)
        expected = reference(made, x, bias)
        assert (outs[0] - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_lose_nothing_by_quantising_give_the_fp32_product(
    form: tuple[int, torch.dtype, bool, int],
) -> None:
    made = matrix((50, 96, 0), *form)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::GROUP] = 127  # so that one step is 1
    exact = x.double() @ reference_rows(made, torch.arange(50)).double().t()
    assert (product(made, x) - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_the_rows_costs_a_percent(bits: int) -> None:
    made = matrix((200, 576, 0), bits, torch.float16, True)
    x = torch.randn(20, 576)
    exact = x @ reference_rows(made, torch.arange(200)).t()
    error = (product(made, x) - exact).norm() / exact.norm()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(bits: int) -> None:
    made = matrix((70, 160, 0), bits, torch.float16, True)
    x = torch.randn(67, 160)
    alone = torch.cat([product(made, row[None]) for row in x])
    for by in all_instructions():
        for count in range(1, 20):
            assert torch.equal(product(made, x[:count], by), alone[:count])
        assert torch.equal(product(made, x, by), alone)


def test_the_number_of_threads_changes_no_bit() -> None:
    made = matrix((100, 96, 0), 4, torch.float16, True)
    x = torch.randn(11, 96)
    before = torch.get_num_threads()
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(product(made, x))
    torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_number_spoils_its_own_results_only(spoilt: float) -> None:
    made = matrix((40, 64, 0), 8, torch.float16, False)
    x = torch.randn(7, 64)
    clean = product(made, x)
    x[3, 40] = spoilt
    for by in all_instructions():
        out = product(made, x, by)
        assert out[3].isnan().all()
        assert torch.equal(out[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])
    assert reference(made, x)[3].isnan().all()


def test_rows_of_zeros_and_of_the_smallest_numbers_give_zeros() -> None:
    made = matrix((20, 64, 0), 4, torch.float16, True)
    assert torch.equal(product(made, torch.zeros(2, 64)), torch.zeros(2, 20))
    assert torch.equal(product(made, torch.full((2, 64), 1e-40)), torch.zeros(2, 20))


def test_rows_may_lie_apart() -> None:
    made = matrix((20, 64, 0), 8, torch.float16, False)
    x = torch.randn(5, 200)[:, 3:67]
    assert torch.equal(product(made, x), product(made, x.contiguous()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_outputs", [64, 96, 70])
def test_the_compiled_decoder_gets_the_same_products(bits: int, num_outputs: int) -> None:
    host = host_decoder.load()
    assert host is not None
    made = matrix((num_outputs, 160, 5), bits, torch.float16, True)
    bias, team, by = torch.randn(num_outputs), host.team(2), kernel()
    described = by.describe(made)
    form = by.matrix(described, bias)
    numbers = torch.tensor([3, 60])
    assert torch.equal(host.rows(form, numbers), reference_rows(made, numbers))
    for count in (1, 7, 250):
        x = torch.randn(count, 160)
        expected = by.multiply(described, x, bias)
        assert torch.equal(team.multiply(form, x), expected)
        assert form.paired == (num_outputs != 70)
        if form.paired:
            gate, up = expected.chunk(2, dim=1)
            gated = team.multiply(form, x, gated=True)
            torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up)
