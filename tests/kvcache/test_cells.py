import numpy as np

from kvcache.cells import bad_cells, cell_digests


def cells() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.arange(6 * 32, dtype=np.uint8).reshape(6, 32)


def test_digests_are_xxh3_64_of_each_cell() -> None:
    digests = cell_digests(np.array([[], []], dtype=np.uint8))
    assert digests.tolist() == [0x2D06800538D394C2, 0x2D06800538D394C2]  # of no bytes at all
    assert cell_digests(cells())[0] == 0x3523581FE96E4C05
    assert cell_digests(cells()).dtype == np.uint64


def test_a_digest_does_not_depend_on_how_the_cells_lie_in_memory() -> None:
    wide = np.zeros((6, 64), dtype=np.uint8)
    wide[:, ::2] = cells()
    assert (cell_digests(wide[:, ::2]) == cell_digests(cells())).all()


def test_one_wrong_bit_is_found_in_its_cell() -> None:
    digests = cell_digests(cells())
    assert bad_cells(cells(), digests).tolist() == []
    for row in range(6):
        broken = cells()
        broken[row, 31] ^= 1
        assert bad_cells(broken, digests).tolist() == [row]


def test_two_cells_swapped_are_both_bad() -> None:
    swapped = cells()[[0, 2, 1, 3, 4, 5]]
    assert bad_cells(swapped, cell_digests(cells())).tolist() == [1, 2]


def test_no_cells_are_all_well() -> None:
    assert bad_cells(cells()[:0], cell_digests(cells())[:0]).tolist() == []
