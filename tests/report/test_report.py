"""Contract of the report.

One page from cache, packs, evidence and measurements: it refers to nothing outside itself, has no empty drawing, and
the same inputs give the same bytes. Proof counts only for a kernel as it would be built now. Anything missing is said
in words, never drawn empty. `--json` gives the same as data.
"""

import base64
import html
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa4build.cases.acceptance_set import acceptance_cases
from fa4build.cli.report import command
from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import Fa4BuildError
from fa4build.matrix.axes import parse_axes
from fa4build.matrix.variants import valid_variants, variant_axes, written_variants
from fa4build.pipeline import recipe_for
from fa4build.report.benchmarks import Comparison, read_benchmarks
from fa4build.report.changes import changes, read_earlier
from fa4build.report.collect import ReportData, VariantRow, collect
from fa4build.report.elsewhere import levels_elsewhere
from fa4build.report.grid import SIGNS, STAGES, grids, kind_of, stage_of
from fa4build.report.libraries import look_of
from fa4build.report.page import STAGE_WORDS, render_page
from fa4build.report.plots import build_plots, comparison_plots
from fa4build.report.ratios import ratios
from fa4build.report.style import SERIES
from fa4build.report.timelines import inline_svg, read_timelines
from fa4build.shipping.pack import build_pack, write_pack
from fa4build.store.cache import Cache
from fa4build.store.evidence import subject_of, write_record
from fa4build.verify.static import CLASSES
from tests.artifacts import ABI, TOOLCHAIN, made_up_family
from tests.summaries import summary

CAUSAL, FULL, WIDE = "fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full", "fwd-sm90a-bf16-hd64-full"

MEASURED = {
    "device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z", "driver": "580", "schema": 1, "torch": "2.11",
    "variants": [],
    "timing": {
        "forward_tflops": [
            {"head_dim": 128, "causal": False, "seqlen": 4096, "fa4_kernels": 600.5, "cudnn": 597.0},
            {"head_dim": 128, "causal": False, "seqlen": 1024, "fa4_kernels": 550.0, "cudnn": 555.0},
            {"head_dim": 128, "causal": True, "seqlen": 1024, "fa4_kernels": 400.0, "cudnn": 422.0},
        ],
        "host_us": {"fa4_kernels": 7.0},
    },
}  # fmt: skip

SIDE_BY_SIDE = {
    "fwd-hd64": {"case": {"op": "fwd"}, "ours": {"cycles_per_block": 1500.5}, "upstream": {"cycles_per_block": 1490}},
    "fwd-hd128": {"case": {"op": "fwd"}, "ours": {"cycles_per_block": 3000}, "upstream": {"cycles_per_block": 3100}},
}

TIMELINE = (
    '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 20">'
    '<rect width="80" height="9"/></svg>'
)


def fill(
    root: Path, variant_id: str, *, foreign: bool = False, instructions: bool = True, simulated: bool = False
) -> str:
    """A made-up compile of a variant as it would be made now (`foreign`: from other sources); the cubin's digest."""
    recipe = recipe_for(parse_axes(variant_id), current_toolchain(), CompileOptions())
    facts = {
        "target": "sm_90a", "ptxas": "V13.4.59", "symbols": ["k_0"], "registers": 168, "spill_bytes": 0,
        "local_bytes": 0, "shared_bytes": 1024,
    }  # fmt: skip
    inputs = {**recipe.inputs, "options": {"other": True}} if foreign else recipe.inputs
    objects = {"cubin": variant_id.encode() * 999, "plan": b"{}" * 999, "ptx": b"ptx", "log": b"log"}
    entry = Cache(root).put(name=recipe.name, inputs=inputs, facts=facts, objects=objects)
    digest = entry.objects["cubin"].sha256
    if instructions:
        counts = {name: 10 + number for number, name in enumerate(CLASSES)}
        write_record(root, "static", subject_of(entry), summary("static", instructions=counts))
    if simulated:
        cases = len(acceptance_cases(variant_id))
        write_record(root, "simulated", subject_of(entry), summary("simulated", cases=cases))
    return digest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """Everything there can be: three kernels at different stages, a pack, a record of measurements, a timeline."""
    folder = tmp_path_factory.mktemp("report")
    root = folder / "cache"
    fill(root, CAUSAL, simulated=True)
    fill(root, FULL)
    fill(root, WIDE, foreign=True, simulated=True)
    (root / "timing").mkdir()
    (root / "timing" / f"{CAUSAL}.svg").write_text(TIMELINE)
    (folder / "measured.json").write_text(json.dumps(MEASURED))
    (folder / "side_by_side.json").write_text(json.dumps(SIDE_BY_SIDE))
    pack = build_pack(made_up_family(8), pack="fa4-kernels-sm90a", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN)
    return collect(
        Cache(root),
        packs=[write_pack(pack, folder / "pack")],
        benchmarks=[folder / "measured.json", folder / "side_by_side.json"],
    )


@pytest.fixture(scope="module")
def page(data: ReportData) -> str:
    """The page of `data`."""
    return render_page(data)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_every_written_variant_has_a_row(data):
    """In the order of the matrix, whether compiled or not."""
    assert [variant.id for variant in written_variants()] == [row.id for row in data.variants]


@pytest.mark.parametrize(
    ("variant_id", "state", "level", "stage"),
    [
        (CAUSAL, "compiled", "simulated", "simulated"),
        (FULL, "compiled", "static", "static"),
        (WIDE, "outdated", "simulated", "outdated"),  # what was proven is not what would be shipped
        ("fwd-sm90a-bf16-hd64-causal", "implemented", "none", "implemented"),
    ],
)
def test_proof_counts_only_for_a_kernel_as_it_would_be_built_now(data, variant_id, state, level, stage):
    """An outdated kernel keeps its figures, but its stage says that it is outdated."""
    (row,) = [row for row in data.variants if row.id == variant_id]

    assert (state, level, stage) == (row.state, row.level, stage_of(row))


def test_coverage_counts_what_has_a_level_or_a_higher_one(data):
    """Two current kernels: one static, one simulated, which implies static. The outdated one counts nowhere."""
    (line,) = [line for line in data.coverage if (line.arch, line.op) == ("sm90a", "fwd")]

    assert (2, 2, 1, 0) == (line.compiled, line.static, line.simulated, line.silicon)
    assert sum(line.valid for line in data.coverage) == len(valid_variants())


def test_a_pack_shows_its_bytes_before_and_after(data):
    """Read from the manifest; eight similar kernels pack to less."""
    (pack,) = data.packs

    assert ("fa4-kernels-sm90a", 8) == (pack.name, pack.kernels)
    assert 0 < pack.packed_bytes < pack.raw_bytes


def test_measurements_become_panels_with_peers(data):
    """One panel a problem; points by ascending seqlen; every other number is a series."""
    (benchmark,) = data.benchmarks
    full, causal = benchmark.panels

    assert ("measured.json", "forward_tflops") == (benchmark.source, benchmark.name)
    assert "NVIDIA H200" == benchmark.setting["device"]
    assert ("head_dim 128, full", "head_dim 128, causal") == (full.title, causal.title)
    assert {"fa4_kernels": ((1024, 550.0), (4096, 600.5)), "cudnn": ((1024, 555.0), (4096, 597.0))} == full.series


def test_a_measurement_may_have_the_name_of_an_axis(tmp_path):
    """`deterministic: true` describes a problem, `deterministic: 301.5` is a measured kernel."""
    rows = [
        {"head_dim": 64, "deterministic": True, "seqlen": 1024, "ours": 1.5},
        {"head_dim": 64, "seqlen": 1024, "ours": 380.5, "deterministic": 301.5},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"backward_tflops": rows}))
    (benchmark,) = read_benchmarks([tmp_path / "a.json"])

    assert ["head_dim 64, deterministic", "head_dim 64"] == [panel.title for panel in benchmark.panels]
    assert {"ours", "deterministic"} == set(benchmark.panels[1].series)


def test_side_by_side_runs_of_the_timing_model_are_compared(data):
    """Cycles a block by kernel; the description of a case is none."""
    (comparison,) = data.comparisons

    assert {"ours": 1500.5, "upstream": 1490.0} == comparison.cases["fwd-hd64"]


@pytest.mark.parametrize(
    "text", ["no json", "[]", "{}", '{"rows": [1, 2]}', '{"rows": [{"seqlen": 1024, "mask": "full"}]}']
)
def test_a_file_without_measurements_gives_no_drawing(tmp_path, text):
    """It is passed over: benchmarks/ also holds other things."""
    (tmp_path / "other.json").write_text(text)

    assert () == read_benchmarks([tmp_path / "other.json"])


@pytest.mark.parametrize(
    "text",
    [
        "<svg><script>alert(1)</script></svg>",
        '<svg onload="alert(1)"/>',
        '<svg xmlns:x="http://www.w3.org/1999/xlink"><use x:href="https://example.org/a.svg#b"/></svg>',
        '<svg><a href="javascript:alert(1)"/></svg>',
        "<svg><image/></svg>",
        "<html/>",
        "<svg>",
    ],
)
def test_a_drawing_that_runs_code_or_refers_elsewhere_is_left_out(tmp_path, text):
    """A cache may come from another machine."""
    (tmp_path / "timing").mkdir()
    (tmp_path / "timing" / "a.svg").write_text(text)

    assert () == read_timelines([tmp_path / "timing"])


def test_a_timeline_loses_its_xml_header():
    """An element of a page has none."""
    assert TIMELINE.partition("\n")[2] == inline_svg(TIMELINE)


# --- the page ---------------------------------------------------------------------------------------------------------


def drawings(page: str) -> dict[str, str]:
    """SVG text by anchor."""
    return dict(re.findall(r'<figure id="([\w-]+)">.*?(<svg.*?</svg>)', page, re.DOTALL))


def test_the_page_refers_to_nothing_outside_itself(page):
    """No script, no style sheet, no picture, no font, no address other than the names of XML vocabularies."""
    without_names = re.sub(r'xmlns(:\w+)?="[^"]+"', "", page)

    assert not re.search(r"""https?://|//\w+\.\w|<script|<link|src="(?!data:)|@import|url\((?!#)""", without_names)


def test_all_drawings_are_there_and_none_is_empty(page):
    """Each has marks in a series' colour; nothing is a placeholder colour any more."""
    found = drawings(page)

    assert {
        "registers", "instruction-mix", "sizes", "compression", "timing-1", "benchmark-1",
        "exp2-error", "rescale-rates", "forward-roofline", "tile-bounds",
    } == set(found)  # fmt: skip
    for name, svg in found.items():
        assert re.search(r"var\(--series-\d\)", svg), name
        assert not any(color in svg for color in SERIES), name


def test_both_themes_and_print_define_every_colour_that_is_used(page):
    """:root three times: light, dark, paper."""
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    themes = re.findall(r":root \{(.*?)\}", page, re.DOTALL)

    assert 3 == len(themes)
    for theme in themes:
        assert used <= set(re.findall(r"--([\w-]+):", theme))


def test_ids_are_unique_and_references_lead_somewhere(page):
    """Drawings are made one by one and would repeat each other's ids."""
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    references = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))

    assert [] == [name for name, count in ids.items() if count > 1]
    assert references <= set(ids)


def test_the_same_inputs_give_the_same_bytes(data, page):
    """No time, no counter, no hash order."""
    assert page == render_page(data)


def test_what_is_slow_comes_first_as_a_ratio_to_the_best_library(data, page):
    """Ours over the best of the others at each length, ascending; with names for people."""
    found = [(row.problem, row.seqlen, round(row.ratio, 2), row.best_name) for row in data.ratios]

    # 400/422, 550/555, 600.5/597
    assert [
        ("head_dim 128, causal", 1024, 0.95, "cuDNN"),
        ("head_dim 128, full", 1024, 0.99, "cuDNN"),
        ("head_dim 128, full", 4096, 1.01, "cuDNN"),
    ] == found
    section = page.partition('id="slow"')[2].partition("<h2")[0]
    assert section.index("0.95") < section.index("0.99") < section.index("1.01")
    assert "fa4_kernels" not in re.sub(r"<[^>]*>", "", page)


def test_a_ratio_is_of_speeds_whatever_the_unit(tmp_path):
    """Half the time is twice the speed. Deterministic and varlen runs are not compared with plain ones."""
    rows = [{"seqlen": 64, "fa4_kernels": 5.0, "cudnn": 10.0, "fa4_kernels_packed": 1.0, "fa2": 20.0}]
    (tmp_path / "a.json").write_text(json.dumps({"decode_us": rows}))
    (row,) = ratios(read_benchmarks([tmp_path / "a.json"]))

    assert (2.0, 10.0, "cuDNN") == (row.ratio, row.best, row.best_name)


def test_a_library_has_one_colour_everywhere():
    """Whatever else is drawn beside it; deterministic and varlen runs are dashed."""
    looks = {name: look_of(name) for name in ("fa4_kernels", "ours", "fa4_kernels_deterministic", "upstream")}

    assert looks["fa4_kernels"].color == looks["ours"].color == looks["fa4_kernels_deterministic"].color
    assert looks["upstream"].color == look_of("flash_attn_4").color != looks["ours"].color
    assert "--" == looks["fa4_kernels_deterministic"].style
    assert "flash-attn-4" == looks["upstream"].label


def earlier_of(data: ReportData) -> dict[str, object]:
    """What `--json` would have printed."""
    return json.loads(json.dumps(data.as_dict()))


def test_nothing_changed_is_said(data):
    """A report beside itself."""
    assert () == changes(data, earlier_of(data))
    assert "Nothing: the same kernels" in render_page(data, differences=())


def test_what_changed_is_listed_with_the_worse_first(data):
    """Registers, evidence, sizes, kernels that came or went, and ratios."""
    earlier = earlier_of(data)
    rows = {row["id"]: row for row in earlier["variants"]}
    rows[CAUSAL]["facts"]["registers"] = 160
    rows[FULL]["level"] = "silicon"
    rows[FULL]["sizes"]["cubin"] *= 2
    earlier["variants"].append({**rows[FULL], "id": "fwd-gone"})
    earlier["ratios"][0]["ratio"] = 1.2
    found = changes(data, earlier)

    assert {
        (CAUSAL, "registers", "160", "168", True),
        (FULL, "evidence", "silicon", "static", True),
        ("fwd-gone", "kernel", "there", "none", True),
        ("forward, head_dim 128, causal, seqlen 1024", "ours / best other", "1.20", "0.95", True),
    } == {(c.subject, c.what, c.before, c.after, c.is_worse) for c in found if c.is_worse}
    assert [(FULL, "bytes of cubin")] == [(c.subject, c.what) for c in found if not c.is_worse]
    assert "5 differences, 4 of them for the worse" in render_page(data, differences=found)


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_what_is_no_earlier_report_is_refused(tmp_path, text):
    """With the file and the command that writes one."""
    (tmp_path / "old.json").write_text(text)

    with pytest.raises(Fa4BuildError, match=r"old\.json.*`fa4build report --json`"):
        read_earlier(tmp_path / "old.json")


def test_evidence_of_kernels_that_are_not_built_here_is_shown_as_such(tmp_path):
    """From committed records, by id. A GPU's record counts only for the cubin that was simulated last."""
    target = tmp_path / "sm90a"
    target.mkdir()
    kernels = {FULL: {"cubin_sha256": "1" * 64}, CAUSAL: {"cubin_sha256": "2" * 64}}
    ran = [
        {"id": FULL, "cubin_sha256": "1" * 64, "passed": True},
        {"id": CAUSAL, "cubin_sha256": "9" * 64, "passed": True},
    ]
    (target / "simulated.json").write_text(json.dumps({"kernels": kernels}))
    (target / "h200.json").write_text(json.dumps({"variants": ran}))

    assert {FULL: "silicon", CAUSAL: "simulated"} == levels_elsewhere([tmp_path])


def test_what_is_committed_is_shown_for_an_empty_cache(tmp_path):
    """Of every target; compiled here is nothing."""
    found = collect(Cache(tmp_path / "none"), evidence_dirs=[Path(__file__).resolve().parents[2] / "evidence"])
    stages = Counter((row.arch, stage_of(row)) for row in found.variants)

    assert stages["sm100a", "simulated-elsewhere"] > 300
    assert stages["sm90a", "silicon-elsewhere"] > 0
    assert 0 == sum(count for (_, stage), count in stages.items() if stage in ("static", "simulated", "silicon"))


def test_a_report_tells_its_progress(tmp_path):
    """On stderr, a line a step."""
    done = CliRunner().invoke(command, ["--out", str(tmp_path / "r.html"), "--cache-dir", str(tmp_path / "cache")])

    assert re.search(r"reading the cache.*looking up \d+ kernels.*drawing", done.stderr, re.DOTALL)


def test_the_timeline_and_the_measurements_are_shown(page):
    """With what they were measured on."""
    assert base64.b64encode(TIMELINE.partition("\n")[2].encode()).decode() in page
    assert "device NVIDIA H200" in page


def test_an_empty_cache_says_what_to_do_and_draws_nothing_empty(tmp_path):
    """The models need nothing built; the rest says which command makes it."""
    page = render_page(collect(Cache(tmp_path / "none")))

    assert {"exp2-error", "rescale-rates", "forward-roofline", "tile-bounds"} == set(drawings(page))
    assert "<code>fa4build matrix</code>" in page
    assert "No measurements were given" in page
    assert not (tmp_path / "none").exists()


def test_without_static_proof_the_mix_is_left_out_and_said_so(tmp_path):
    """Registers and sizes come from the compile alone."""
    fill(tmp_path, FULL, instructions=False)
    found = collect(Cache(tmp_path))

    assert ["registers", "sizes"] == [plot.name for plot in build_plots(found)]
    assert "<code>fa4build verify --static</code>" in render_page(found)


def test_a_grid_has_a_mark_for_every_kernel(data):
    """Where its kind, head dimension, data type and mask put it: bf16 hd128 full is static, causal simulated."""
    found = {grid.title: grid for grid in grids(data.variants)}
    grid = found["fwd, sm90a"]
    cells = dict(zip(grid.columns, dict(grid.rows)["dense"], strict=True))
    titles = [mark.title for grid in found.values() for _, line in grid.rows for cell in line for mark in cell if mark]

    assert ("bf16", "fp16") == grid.dtypes
    assert ("full", "causal", "local") == grid.masks
    assert ["S", "M"] == [mark.sign for mark in cells["128"][:2]]
    assert f"{CAUSAL}: simulated" == cells["128"][1].title
    assert Counter(row.id for row in data.variants) == Counter(title.partition(":")[0] for title in titles)
    assert set(STAGES) == set(SIGNS) == set(STAGE_WORDS)


def rows_of(model: VariantRow, variants) -> tuple[VariantRow, ...]:
    """As if all of these were compiled and proven as one that is."""
    return tuple(
        replace(model, id=variant.id, op=variant.op, arch=variant.arch, axes=variant_axes(variant))
        for variant in variants
    )


@pytest.fixture(scope="module")
def large(data: ReportData) -> ReportData:
    """Every second valid variant as if it were compiled and proven: more than will be written for long."""
    (model,) = [row for row in data.variants if row.id == CAUSAL]
    return replace(data, variants=rows_of(model, valid_variants()[::2]))


def test_kinds_name_what_a_kernel_can_do(data):
    """Layout first, then what is on; the data types and masks are within the cell."""
    (model,) = [row for row in data.variants if row.id == CAUSAL]
    spelled = {
        "fwd-sm90a-bf16-hd128-causal": "dense",
        "fwd-sm90a-bf16-hd128-causal-paged-split-softcap": "paged split softcap",
        "bwd-sm100a-bf16-hd128-full-varlen-2cta-deterministic": "varlen 2cta deterministic",
        "fwd_combine-sm90a-bf16-hd128-sink": "dense sink",
    }

    assert list(spelled.values()) == [kind_of(row) for row in rows_of(model, map(parse_axes, spelled))]


def test_the_mix_has_a_bar_for_each_head_dimension(large):
    """However many kernels there are: at most 6 head dimensions for each of 2 ops on 3 targets."""
    mix = {plot.name: plot.svg for plot in build_plots(large)}["instruction-mix"]
    named = re.findall(r">((?:fwd|bwd)-sm\d+a-[\w-]+)<", mix)

    assert 20 < len(named) == len(set(named)) <= 36


def test_a_large_matrix_is_drawn_in_seconds_and_small(large):
    """Some 1500 kernels: under 10 s of work and 5 MB. The long lists are folded."""
    start = time.process_time()
    page = render_page(large)

    assert len(large.variants) > 1400
    assert time.process_time() - start < 10
    assert len(page.encode()) < 5_000_000
    assert "<details open" not in page


def test_a_case_that_was_measured_for_one_kernel_has_one_bar(data):
    """Not a bar of length 0, which would read as a measurement."""
    alone = Comparison(source="a.json", cases={"x": {"ours": 10.0, "upstream": 12.0}, "y": {"ours": 11.0}})
    (plot,) = comparison_plots([alone])

    assert ["10", "11", "12"] == sorted(re.findall(r">(\d+)</text>", plot.svg.partition("cycles per KV block")[2]))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_says_how_large_it_is(tmp_path):
    """On stderr; stdout stays empty."""
    done = CliRunner().invoke(command, ["--out", str(tmp_path / "r.html"), "--cache-dir", str(tmp_path / "cache")])

    assert 0 == done.exit_code
    assert "" == done.stdout
    assert re.search(r"r\.html: \d+\.\d kB, \d+\.\d s", done.stderr)
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_json_is_one_document_and_needs_no_matplotlib(tmp_path, monkeypatch):
    """The same content as data; no page is made."""
    fill(tmp_path, FULL)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(command, ["--json", "--cache-dir", str(tmp_path)])
    document = json.loads(done.stdout)

    assert 0 == done.exit_code
    assert {"compiled", "implemented"} == {row["state"] for row in document["variants"]}
    assert set(document) == {
        "schema", "version", "commit", "about", "toolchain", "refused", "coverage", "variants", "packs", "benchmarks",
        "ratios", "comparisons", "timelines",
    }  # fmt: skip


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    """And nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--out", str(tmp_path / "r.html"), "--cache-dir", str(tmp_path)]
    done = CliRunner().invoke(command, arguments)

    assert "pip install 'fa4build[report]'" in str(done.exception)
    assert not (tmp_path / "r.html").exists()


def test_a_page_needs_a_place():
    """--out is left out only with --json."""
    done = CliRunner().invoke(command, [])

    assert 2 == done.exit_code
    assert "--out FILE.html" in done.stderr


# --- in a browser -----------------------------------------------------------------------------------------------------

BOXES = """
<script>
const rows = [...document.querySelectorAll("figure svg")].map(svg => {
  const whole = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("[style*='--series-']")].map(mark => mark.getBoundingClientRect());
  const outside = [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < whole.left - 2 || box.right > whole.right + 2;
  });
  return [whole.width, whole.height, marks.filter(box => box.width + box.height > 1).length, outside.length];
});
document.title = JSON.stringify(rows);
</script>
"""


def chromium(*arguments: str) -> str:
    """Runs a headless browser; skips the test where there is none."""
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium here")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1400")
    done = subprocess.run([found[0], *flags, *arguments], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_a_browser_draws_every_figure(page, tmp_path):
    """As wide as the column, with visible marks, and no text runs out of its drawing."""
    (tmp_path / "page.html").write_text(page.replace("</body>", BOXES + "</body>"))
    dom = chromium("--dump-dom", (tmp_path / "page.html").as_uri())
    found = re.search(r"<title>(.*?)</title>", dom)

    assert found is not None
    rows = json.loads(found[1])
    assert 10 == len(rows)
    for width, height, marks, outside in rows:
        assert width > 600
        assert height > 60
        assert marks > 0
        assert 0 == outside


FITS = """
<script>
const root = document.documentElement;
const cells = [...document.querySelectorAll("table.stack td")].map(cell => cell.getBoundingClientRect().right);
parent.document.title = JSON.stringify([innerWidth, root.scrollWidth, Math.ceil(Math.max(...cells))]);
</script>
"""


def test_the_page_fits_a_phone(page, tmp_path):
    """At 390 pixels nothing sticks out of the page, and no cell of the tables about coverage, speed and changes."""
    inner = html.escape(page.replace("</body>", FITS + "</body>"))
    frame = (
        f'<body style="margin:0"><iframe srcdoc="{inner}" style="border:0;width:390px;height:800px"></iframe></body>'
    )
    (tmp_path / "phone.html").write_text(frame)
    dom = chromium("--dump-dom", (tmp_path / "phone.html").as_uri())
    found = re.search(r"<title>(.*?)</title>", dom)

    assert found is not None
    inner_width, whole, cells = json.loads(found[1])
    assert inner_width == 390
    assert whole <= 390
    assert cells <= 390


@pytest.mark.parametrize(("scheme", "is_dark"), [("1", False), ("0", True)], ids=["light", "dark"])
def test_the_page_follows_the_theme_of_the_reader(page, tmp_path, scheme, is_dark):
    """The picture's background is what the theme says, and its drawings stand out from it."""
    from matplotlib import image

    (tmp_path / "page.html").write_text(page)
    target = tmp_path / "page.png"
    chromium(
        f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={target}", (tmp_path / "page.html").as_uri()
    )
    pixels = image.imread(target)[:, :, :3].mean(axis=2)

    assert is_dark == (pixels[5, 5] < 0.5)
    assert (abs(pixels - pixels[5, 5]) > 0.3).mean() > 0.01


def test_the_page_prints(page, tmp_path):
    """To a PDF of several pages."""
    (tmp_path / "page.html").write_text(page)
    target = tmp_path / "page.pdf"
    chromium(f"--print-to-pdf={target}", "--no-pdf-header-footer", (tmp_path / "page.html").as_uri())

    assert len(re.findall(rb"/Type /Page\b", target.read_bytes())) > 3
