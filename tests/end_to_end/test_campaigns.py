"""Contract of the campaigns: kills lose nothing, mutations load nothing (docs/reliability.md)."""

import pytest

from tests.end_to_end import kill_campaign, mutation_campaign


@pytest.mark.slow
def test_950_kills_lose_nothing():
    """Each rerun gives the bytes of a run that nobody killed, and most kills came before the end."""
    rows = kill_campaign.campaign(950)

    assert sum(row["kills"] for row in rows.values()) == 950
    assert sum(row["before_the_end"] for row in rows.values()) > 950 / 2


@pytest.mark.slow
def test_mutations_load_nothing():
    """All but unsigned records of the right form, which only a signature could tell, are refused or as they were."""
    rows = mutation_campaign.campaign(2000, 100)

    assert {end for row in rows.values() for end in row} <= {"refused", "as it was", "a miss", "forged"}
    assert all("forged" not in row for name, row in rows.items() if name != "evidence")
