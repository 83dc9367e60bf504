"""Contract: the swizzle of a shared address is the table of PTX 5.5.7: row r of a pattern has its 16-byte units XORed.

128-byte span: 8 rows of 8 units, unit u of row r lies at u ^ r. 64: 2 rows of the span share one 128-byte line, so the
row number is r // 2. 32: four share a line, r // 4.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.swizzle import pattern_bytes, swizzle_address, swizzle_address_128_atom32

SPANS = [0, 32, 64, 128]


@pytest.mark.parametrize(
    ("span", "line_units"),
    [
        # For each 128-byte line of a pattern: which unit holds logical units 0..7.
        (0, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (32, [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]]),
        (
            64,
            [
                [0, 1, 2, 3, 4, 5, 6, 7],
                [1, 0, 3, 2, 5, 4, 7, 6],
                [2, 3, 0, 1, 6, 7, 4, 5],
                [3, 2, 1, 0, 7, 6, 5, 4],
            ],
        ),
        (
            128,
            [
                [0, 1, 2, 3, 4, 5, 6, 7],
                [1, 0, 3, 2, 5, 4, 7, 6],
                [2, 3, 0, 1, 6, 7, 4, 5],
                [3, 2, 1, 0, 7, 6, 5, 4],
                [4, 5, 6, 7, 0, 1, 2, 3],
                [5, 4, 7, 6, 1, 0, 3, 2],
                [6, 7, 4, 5, 2, 3, 0, 1],
                [7, 6, 5, 4, 3, 2, 1, 0],
            ],
        ),
    ],
)
def test_units_of_each_line_are_exchanged_as_in_the_manual(span, line_units):
    """Row by row, the units of a pattern are the manual's table; the pattern repeats after `pattern_bytes`."""
    lines = len(line_units)
    start = 2048
    found = [
        [(swizzle_address(start + line * 128 + unit * 16, span) - start - line * 128) // 16 for unit in range(8)]
        for line in range(lines)
    ]

    assert line_units == found
    assert {0: 16, 32: 256, 64: 512, 128: 1024}[span] == pattern_bytes(span)


@pytest.mark.parametrize("span", SPANS)
def test_swizzle_is_its_own_inverse_and_permutes_each_pattern(span):
    """Applying the swizzle twice gives the address back, and 1024 aligned bytes map onto themselves."""
    addresses = np.arange(1024, 3072)
    swizzled = swizzle_address(addresses, span)

    assert addresses.tolist() == swizzle_address(swizzled, span).tolist()
    assert list(range(1024, 2048)) == sorted(swizzled[:1024].tolist())


@pytest.mark.parametrize("span", SPANS)
def test_bytes_inside_a_unit_stay_together(span):
    """Address bits 0 to 3 and from 7 up never change."""
    addresses = np.arange(0, 4096)
    changed = addresses ^ swizzle_address(addresses, span)

    assert 0 == np.bitwise_or.reduce(changed & ~0x70)


def test_the_32_byte_atom_form_moves_pairs_of_units():
    """Line 1 of the 128-byte pattern with 32-byte atoms swaps bytes 0-31 with 32-63; line 4 is as line 0."""
    assert [128 + 32, 128, 128 + 96] == [swizzle_address_128_atom32(128 + offset) for offset in (0, 32, 64)]
    assert 512 == swizzle_address_128_atom32(512)


def test_an_unknown_span_is_refused():
    """Only 0, 32, 64 and 128 bytes exist."""
    with pytest.raises(SimulationError, match="48"):
        swizzle_address(0, 48)
