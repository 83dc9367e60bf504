"""Contract: cursors walk a ring and flip parity at its end; counts and barrier numbers match what the warps do."""

import pytest

from kernels_src.pipelines import named_barriers
from kernels_src.pipelines.arrive_counts import forward_arrive_counts
from kernels_src.pipelines.ring import Cursor
from kernels_src.warp_roles import WarpRoles

HARDWARE_BARRIERS = 16  # named barriers of a CTA (PTX ISA, bar)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_cursor_passes_every_stage_and_flips_parity(stages):
    """Fill n uses stage n mod stages, in pass n // stages."""
    at = Cursor(0, 0)
    for n in range(4 * stages):
        assert at == (n % stages, n // stages % 2)
        at = at.next(stages)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_previous_undoes_next(stages):
    """Also over the end of the ring, where the parity flips back."""
    at = Cursor(0, 0)
    for _ in range(3 * stages):
        assert at.next(stages).previous(stages) == at
        at = at.next(stages)


@pytest.mark.parametrize(
    ("consumer_warpgroups", "tile_empty"),
    [(1, 4), (2, 8), (3, 12)],  # four warps a group, one arrival each
)
def test_arrive_counts(consumer_warpgroups, tile_empty):
    """Full after the copy's one arrival, empty after every consumer warp's; a turn joins two groups of 128."""
    assert forward_arrive_counts(consumer_warpgroups) == (1, tile_empty, 256, 128)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_named_barriers_are_distinct_and_exist(groups):
    """The CTA's own barrier, one per turn and one per epilogue."""
    numbers = [named_barriers.CTA]
    numbers += [named_barriers.turn_barrier(group) for group in range(groups)]
    numbers += [named_barriers.epilogue_barrier(group, groups) for group in range(groups)]
    assert len(set(numbers)) == 1 + 2 * groups
    assert max(numbers) < HARDWARE_BARRIERS


@pytest.mark.parametrize("groups", [2, 3])
def test_turns_go_round_all_groups(groups):
    """Starting anywhere, the token is back after as many steps as there are groups, and was at each once."""
    group, seen = 0, []
    for _ in range(groups):
        seen.append(group)
        group = named_barriers.next_warpgroup(group, groups)
    assert group == 0
    assert sorted(seen) == list(range(groups))


def simulate_turns(groups: int, steps: int) -> list[tuple[int, int]]:
    """Who issues when, if group 0 gets the first token; also takes the token left at the end, as the kernel does."""
    tokens = [0] * groups
    tokens[0] = 1
    done, order = [0] * groups, []
    while min(done) < steps:
        ready = [group for group in range(groups) if tokens[group] and done[group] < steps]
        assert ready, "nobody may issue: deadlock"
        for group in ready:
            tokens[group] -= 1
            order.append((done[group], group))
            done[group] += 1
            tokens[named_barriers.next_warpgroup(group, groups)] += 1
    tokens[0] -= 1
    assert tokens == [0] * groups, "a barrier is left half arrived at"
    return order


@pytest.mark.parametrize("groups", [2, 3])
def test_turns_never_block_and_leave_no_barrier_open(groups):
    """Step by step in the order of the groups, and one token left over, which group 0 takes at the end."""
    assert simulate_turns(groups, 5) == [(step, group) for step in range(5) for group in range(groups)]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (WarpRoles(2, 240, 24), None),  # 128 * (24 + 2 * 240) = 64512 of 65536
        (WarpRoles(3, 160, 32), None),  # 128 * (32 + 3 * 160) = 65536
        (WarpRoles(3, 168, 32), "68608 registers"),  # 128 * (32 + 3 * 168): the last group would wait for ever
        (WarpRoles(2, 236, 24), "multiples of 8"),
        (WarpRoles(2, 240, 16), "from 24 to 256"),
    ],
)
def test_register_splits_that_cannot_run_are_named(roles, words):
    """setmaxnreg takes multiples of 8 from 24 to 256, and blocks while the register file is short."""
    misfit = roles.misfit()
    assert (misfit is None) == (words is None)
    if words:
        assert words in misfit
