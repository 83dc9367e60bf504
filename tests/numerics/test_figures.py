"""Contract: every published figure that the design rests on, with its tolerance, and that ours is within it.

The table is literal, so that neither a published value nor a tolerance can be changed in one place. Sources: the
FlashAttention-4 paper (arXiv 2603.05451) for errors, cycles and the claim; published experiments for the rest.
"""

import json
import re
import time

import pytest
from click.testing import CliRunner

from fa4build.cli.numerics import GROUPS, command
from fa4build.numerics import figures
from fa4build.numerics.figures import Figure

# name: published value, tolerance (three digits)
TABLE = (
    ("degree 3 on [0, 1): largest relative error", 8.77e-05, 4.39e-07),
    ("degree 3 on [0, 1): mean relative error", 5.43e-05, 5.43e-07),
    ("degree 3 on [0, 1): bf16 identical", 99.0, 0.02),
    ("degree 3 on [0, 1): largest distance in bf16 ulps", 1, 0.0),
    ("degree 4 on [0, 1): largest relative error", 3.05e-06, 1.07e-07),
    ("degree 4 on [0, 1): mean relative error", 1.84e-06, 1.84e-08),
    ("degree 4 on [0, 1): bf16 identical", 99.967, 0.00405),
    ("degree 4 on [0, 1): largest distance in bf16 ulps", 1, 0.0),
    ("degree 5 on [0, 1): largest relative error", 1.44e-07, 7.2e-10),
    ("degree 5 on [0, 1): mean relative error", 5.48e-08, 5.48e-10),
    ("degree 5 on [0, 1): bf16 identical", 99.999, 0.00112),
    ("degree 5 on [0, 1): largest distance in bf16 ulps", 1, 0.0),
    ("degree 3 on [-20, 8): largest relative error", 8.77e-05, 4.39e-07),
    ("degree 3 on [-20, 8): mean relative error", 5.43e-05, 5.43e-07),
    ("degree 3 on [-20, 8): bf16 identical", 99.0, 0.02),
    ("degree 3 on [-20, 8): largest distance in bf16 ulps", 1, 0.0),
    ("degree 4 on [-20, 8): largest relative error", 3.05e-06, 1.07e-07),
    ("degree 4 on [-20, 8): mean relative error", 1.84e-06, 1.84e-08),
    ("degree 4 on [-20, 8): bf16 identical", 99.967, 0.00405),
    ("degree 4 on [-20, 8): largest distance in bf16 ulps", 1, 0.0),
    ("degree 5 on [-20, 8): largest relative error", 1.44e-07, 2.14e-08),
    ("degree 5 on [-20, 8): mean relative error", 5.48e-08, 5.48e-10),
    ("degree 5 on [-20, 8): bf16 identical", 99.999, 0.00112),
    ("degree 5 on [-20, 8): largest distance in bf16 ulps", 1, 0.0),
    ("N(0, 1.5²), threshold 0: rows", 6.2, 0.6),
    ("N(0, 1.5²), threshold 0: warps", 67, 3.0),
    ("N(0, 1.5²), threshold 8: rows", 0, 0.0),
    ("N(0, 1.5²), threshold 8: warps", 0, 0.0),
    ("N(0, 6²), threshold 0: rows", 6.1, 0.6),
    ("N(0, 6²), threshold 0: warps", 67, 3.0),
    ("N(0, 6²), threshold 8: rows", 0.7, 0.6),
    ("N(0, 6²), threshold 8: warps", 19, 3.0),
    ("N(0, 1.5²) + rise of 24, threshold 0: rows", 54, 1.08),
    ("N(0, 1.5²) + rise of 24, threshold 0: warps", 100, 0.1),
    ("N(0, 1.5²) + rise of 24, threshold 8: rows", 3.3, 0.6),
    ("N(0, 1.5²) + rise of 24, threshold 8: warps", 35, 3.0),
    ("N(0, 1.5²) + rise of 96, threshold 0: rows", 95, 1.9),
    ("N(0, 1.5²) + rise of 96, threshold 0: warps", 100, 0.1),
    ("N(0, 1.5²) + rise of 96, threshold 8: rows", 16, 0.6),
    ("N(0, 1.5²) + rise of 96, threshold 8: warps", 83, 3.0),
    ("flat rows, threshold 0: relative L2 error", 0.0016, 0.00021),
    ("flat rows, threshold 8: relative L2 error", 0.0017, 0.00022),
    ("peaked rows, threshold 0: relative L2 error", 0.0005, 0.0001),
    ("peaked rows, threshold 8: relative L2 error", 0.0013, 0.00018),
    ("one-shot shift, none: relative L2 error", 0.00065, 6.5e-05),
    ("one-shot shift, even in [0, 8): relative L2 error", 0.00159, 0.000159),
    ("e4m3, flat rows, offset 8, threshold 0: relative L2 error", 0.025, 0.003),
    ("e4m3, flat rows, offset 8, threshold 4: relative L2 error", 0.188, 0.0193),
    ("e5m2, flat rows, offset 8, threshold 0: relative L2 error", 0.05, 0.0055),
    ("e5m2, flat rows, offset 8, threshold 4: relative L2 error", 0.053, 0.0058),
    ("e4m3, peaked rows, offset 8, threshold 0: relative L2 error", 0.008, 0.0013),
    ("e4m3, peaked rows, offset 8, threshold 4: relative L2 error", 0.393, 0.0398),
    ("e5m2, peaked rows, offset 8, threshold 0: relative L2 error", 0.016, 0.0021),
    ("e5m2, peaked rows, offset 8, threshold 4: relative L2 error", 0.037, 0.0042),
    ("e4m3: the build takes offset 8 with threshold 4", 0, 0.0),
    ("e5m2: the build takes offset 8 with threshold 4", 1, 0.0),
    ("T_exp / T_mma, head_dim 64", 2.0, 0.0),
    ("T_exp / T_mma, head_dim 128", 1.0, 0.0),
    ("T_exp / T_mma, head_dim 192", 0.6666666666666666, 0.0),
    ("T_exp / T_mma, head_dim 256", 0.5, 0.0),
    ("forward 128 x 128 x 128: mma", 1024, 0.0),
    ("forward 128 x 128 x 128: exp", 1024, 0.0),
    ("forward 128 x 128 x 128: shared", 768, 0.0),
    ("forward 256 x 128 x 128: mma", 2048, 0.0),
    ("forward 256 x 128 x 128: exp", 2048, 0.0),
    ("forward 256 x 128 x 128: shared", 1536, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: mma", 2560, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: exp", 1024, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: shared, operands", 2048, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: shared, dS", 256, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: shared, dQ", 1024, 0.0),
    ("backward 128 x 128 x 128, 1-CTA: shared", 3328, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: mma", 2560, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: exp", 1024, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: shared, operands", 1536, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: shared, dS", 256, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: shared, dS exchange", 384, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: shared, dQ", 512, 0.0),
    ("backward 128 x 128 x 128, 2-CTA: shared", 2688, 0.0),
    ("forward, head_dim 64: excess in the published 25 to 60 % (1 = yes)", 0, 0.0),
    ("forward, head_dim 128: excess in the published 25 to 60 % (1 = yes)", 0, 0.0),
    ("backward 1-CTA, head_dim 64: excess in the published 25 to 60 % (1 = yes)", 1, 0.0),
    ("backward 1-CTA, head_dim 128: excess in the published 25 to 60 % (1 = yes)", 1, 0.0),
    ("backward 2-CTA, head_dim 128: excess in the published 25 to 60 % (1 = yes)", 0, 0.0),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Figure]:
    """All figures by name, computed once, in less time than the command may take."""
    start = time.process_time()
    rows = [figure for group in figures.GROUPS for figure in figures.figures(group)]
    assert time.process_time() - start < 120
    assert len(rows) == len({row.name for row in rows})
    return {row.name: row for row in rows}


def test_every_figure_is_in_the_table_and_the_other_way_round(found):
    """A figure without a test cannot be added, nor a test go stale."""
    assert {name for name, *_ in TABLE} == set(found)


@pytest.mark.parametrize(("name", "published", "tolerance"), TABLE, ids=[row[0] for row in TABLE])
def test_a_published_figure_is_reproduced(found, name, published, tolerance):
    """Ours is within the stated tolerance of the published value."""
    figure = found[name]

    assert published == figure.published
    assert tolerance == pytest.approx(figure.tolerance, rel=0.005)
    assert abs(figure.ours - published) <= tolerance * 1.005
    assert figure.holds


def test_a_figure_outside_its_tolerance_does_not_hold():
    """One step beyond is beyond."""
    figure = Figure(group="g", name="n", published=1.0, ours=1.25, tolerance=0.25)

    assert figure.holds
    assert not Figure(group="g", name="n", published=1.0, ours=1.2500001, tolerance=0.25).holds


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_offers_every_group():
    """Its choice is written out, so that --help loads no numpy."""
    assert GROUPS == tuple(figures.GROUPS)


def test_json_is_one_document_of_all_figures():
    """With name, published value, ours, tolerance, and whether it holds."""
    done = CliRunner().invoke(command, ["--group", "roofline", "--json"])
    rows = json.loads(done.stdout)["values"]

    assert 0 == done.exit_code
    assert all(row["holds"] for row in rows)
    assert {"name": "forward 128 x 128 x 128: shared", "published": 768, "ours": 768.0}.items() <= rows[6].items()


def test_the_table_shows_published_and_ours_side_by_side():
    """A line a figure; the summary goes to stderr."""
    done = CliRunner().invoke(command, ["--group", "roofline", "--notes"])

    assert re.search(r"backward 128 x 128 x 128, 2-CTA: shared +2688 cycles +2688 cycles +exact +ok", done.stdout)
    assert re.search(r"28 values, 0 outside their tolerance", done.stderr)


def test_a_figure_outside_makes_the_command_fail(monkeypatch):
    """Exit code 1, and the line says so."""
    wrong = Figure(group="roofline", name="made up", published=1.0, ours=2.0, tolerance=0.5)
    monkeypatch.setattr(figures, "figures", lambda group: (wrong,))
    done = CliRunner().invoke(command, ["--group", "roofline"])

    assert 1 == done.exit_code
    assert "OUTSIDE" in done.stdout
