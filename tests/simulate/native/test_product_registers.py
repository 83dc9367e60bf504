"""Contract of R8 for accumulators that a thread has read: a wgmma.fence stands before the next product on them.

The manual asks for the fence between any access of a thread to a register and a product that accesses it, but for
accumulators from product to product. The native engine alone looks at reads.
"""

import pytest

from tests.simulate.native.rule_snippets import told
from tests.simulate.test_wgmma import MMA, _body, _data

FENCE, COMMIT, WAIT = (
    *("wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"),
    "wgmma.wait_group.sync.aligned 0;",
)
READ = "st.global.b32 [%rd0], %r41;"


def report(between: str) -> str:
    """What is told of two products on the same accumulators, with something between them."""
    body = _body(1, wait=f"{WAIT} {between} {MMA} {COMMIT} {WAIT}")
    return told(body, threads=128, words=8, smem=8192, data=_data())


@pytest.mark.parametrize("between", ["", READ + FENCE, FENCE], ids=["nothing", "read-and-fence", "fence"])
def test_products_of_one_shape_need_no_fence_between_them(between):
    """Nor behind a fence that follows the reads."""
    assert report(between) == ""


def test_reading_an_accumulator_asks_for_a_fence_before_the_next_product():
    """The product might write before the thread has read."""
    assert "R8 wgmma" in report(READ)
    assert "accumulator registers (%r41, ...) were read after the last wgmma.fence" in report(READ)


def test_a_fence_in_front_of_the_read_is_none_behind_it():
    """It orders what came before it."""
    assert "were read after the last wgmma.fence" in report(FENCE + READ)


def test_written_and_read_are_told_apart():
    """A write is told as one, also where a read stands beside it."""
    found = report("mov.b32 %r42, 0; " + READ)

    assert "accumulator registers (%r42, ...) were written after the last wgmma.fence" in found
