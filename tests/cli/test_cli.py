"""Contract of the command line.

Results on stdout, everything said on the way on stderr; with --json, stdout is one JSON document. An error is one
message and the exit code of its kind; nothing is written then. Help is quick and its examples work. Commands that only
look leave no trace.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fa4build import cli, errors
from fa4build.cli.commit import commit_of
from fa4build.cli.output import print_table, status
from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import current_toolchain
from fa4build.matrix.axes import parse_axes
from fa4build.matrix.variants import default_variants, written_variants
from fa4build.pipeline import recipe_for
from fa4build.runtime.fa4_kernels.dispatch import Device, Problem, dispatch
from fa4build.runtime.fa4_kernels.record import miss_line
from fa4build.store.cache import Cache
from tests.artifacts import COMPILER_CACHE
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan

ROOT = Path(__file__).resolve().parents[2]
VARIANT_ID = "fwd-sm90a-bf16-hd128-causal"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def fa4build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Done]:
    """Runs a command in this process, in an empty directory, with the cache in its subdirectory `cache`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA4BUILD_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        return Done(code=ended.value.code, out=captured.out, err=captured.err)

    return run


def fill(root: Path, variant_id: str = VARIANT_ID) -> str:
    """A finished compile of a variant, as it would be made now, without compiling. Returns its key."""
    recipe = recipe_for(parse_axes(variant_id), current_toolchain(), CompileOptions())
    symbol = f"{variant_id.replace('-', '_')}_0"
    cubin = made_up_cubin({symbol: MadeUpEntry()}, code=variant_id.encode())
    facts = {
        "target": "sm_90a",
        "ptxas": "V13.4.59",
        "symbols": [symbol],
        "registers": 168,
        "spill_bytes": 0,
        "local_bytes": 0,
        "shared_bytes": 1024,
    }
    plan = made_up_plan(cubin, [symbol], smem=1024)
    objects = {"cubin": cubin, "plan": plan, "ptx": b"ptx", "log": b"log"}
    Cache(root).put(name=recipe.name, inputs=recipe.inputs, facts=facts, objects=objects)
    return recipe.key


# --- help -------------------------------------------------------------------------------------------------------------

HELP = (
    {name: [name, "--help"] for name in cli.COMMANDS}
    | {f"cache {name}": ["cache", name, "--help"] for name in ("ls", "info", "verify", "prune", "export", "import")}
    | {f"key {name}": ["key", name, "--help"] for name in ("new", "show")}
)


@pytest.mark.parametrize("arguments", HELP.values(), ids=list(HELP))
def test_every_command_has_help(fa4build, arguments):
    """With its options described."""
    done = fa4build(*arguments)

    assert done.code == 0
    assert done.out.startswith("Usage: fa4build " + arguments[0])
    assert "--json" in done.out or arguments in (["cache", "--help"], ["key", "--help"])


def examples() -> list[str]:
    """Every line of help that shows a command without changing anything but the cache."""
    found = []
    for name in cli.COMMANDS:
        command = cli.cli.get_command(None, name)
        found += re.findall(
            r"^ *fa4build ((?:plan|matrix|list|explain|cache ls) .*?)(?:   .*)?$", command.help, re.MULTILINE
        )
    return found


@pytest.mark.parametrize("example", examples())
def test_the_examples_in_help_work(fa4build, example, tmp_path):
    """What they show is done (compiling is left out); those for kernels not written yet say so."""
    (tmp_path / "serving.toml").write_text('edition = 1\nselect = ["fwd-sm90a-*-hd128-causal"]\n')
    for config in ("config.json", "gpt-oss-120b/config.json", "qwen3/config.json", "gemma3/config.json"):
        (tmp_path / config).parent.mkdir(exist_ok=True)
        (tmp_path / config).write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
    missed = dispatch(problem, Device(name="H200", compute_capability=(9, 0)), ())
    (tmp_path / "misses.jsonl").write_text(miss_line(missed))
    done = fa4build(*shlex.split(example), *(["--dry-run"] if "matrix" in example else []))

    expected = {0}
    if "sm100" in example and not any(variant.arch == "sm100a" for variant in written_variants()):
        expected = {errors.NothingSelectedError.exit_code, 0}
    if "matrix --family flash-attn-4" in example and importlib.util.find_spec("flash_attn") is None:
        expected = {errors.ToolchainError.exit_code}
    if "--assert-cached" in example:
        expected = {errors.NotCachedError.exit_code}
    assert done.code in expected, done.err


def test_help_names_every_exit_code(fa4build):
    """From the error tree, so that a new error cannot be forgotten."""
    kinds = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    text = re.search(r"has its own exit code:.*\.", fa4build("--help").out, re.DOTALL)

    assert text is not None
    assert {int(number) for number in re.findall(r"\d+", text[0])} == kinds - {1}


def run_process(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command in a process of its own, and the seconds of processor time it took."""
    return run_python("-m", "fa4build.cli", *arguments, **environment)


def run_python(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """As run_process, of any Python."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    after = os.times()
    return done, after.children_user + after.children_system - before.children_user - before.children_system


def test_the_version_names_the_commit_where_there_is_one(fa4build, tmp_path):
    """Read from the files of a checkout, of a worktree and of packed references; a folder without any has none."""
    head, name = "a" * 40, "refs/heads/main"
    checkout, worktree = tmp_path / "checkout", tmp_path / "worktree"
    (checkout / ".git" / "worktrees" / "w").mkdir(parents=True)
    worktree.mkdir()
    (checkout / ".git" / "HEAD").write_text(f"ref: {name}\n")
    (checkout / ".git" / "packed-refs").write_text(f"# pack-refs with: peeled\n{head} {name}\n")
    (worktree / ".git").write_text(f"gitdir: {checkout}/.git/worktrees/w\n")
    (checkout / ".git" / "worktrees" / "w" / "HEAD").write_text(f"{'b' * 40}\n")
    (checkout / ".git" / "worktrees" / "w" / "commondir").write_text("../..\n")

    assert (commit_of(checkout), commit_of(worktree), commit_of(tmp_path)) == (head, "b" * 40, None)
    assert re.fullmatch(r"fa4build \S+( \(commit [0-9a-f]{12}\))?\n", fa4build("--version").out)


def test_python_m_fa4build_is_the_command():
    """For where the script is not on the path."""
    done, _ = run_python("-m", "fa4build", "--version")

    assert done.stdout.startswith("fa4build ")


def test_help_is_quick():
    """0.3 s of processor time; it imports neither rendering nor compiler nor rich."""
    _, seconds = run_process("--help")
    code = "import sys; from fa4build.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "print(sorted({'jinja2', 'rich', 'cutlass', 'numpy', 'jsonschema', 'fa4build.pipeline'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert seconds < 0.3
    assert done.stdout.splitlines()[-1] == "[]"


# Work like that of a command that finds all in the cache, half a second where that one takes one. Seconds alone would
# not do: machines, and one machine within minutes, differ by a factor of two.
YARDSTICK = """
import ast, inspect, json
text = inspect.getsource(ast)
for _ in range(14):
    json.dumps(ast.dump(ast.parse(text)).split("("))
"""


def test_a_matrix_that_is_cached_takes_a_second_where_the_yardstick_takes_half_a_one(tmp_path):
    """All kernels of a target, looked up and verified: processor time, the least of three, since what shares a core
    only adds to it. A quarter more is allowed."""
    ids = [variant.id for variant in default_variants() if variant.arch == "sm90a"]
    for id_ in ids:
        fill(tmp_path, id_)
    matrix, yardstick = [], []
    for _ in range(3):
        done, seconds = run_process("matrix", "--arch", "sm90", "--json", FA4BUILD_CACHE_DIR=str(tmp_path))
        assert json.loads(done.stdout)["counts"] == {"cached": len(ids), "compiled": 0, "failed": 0}
        matrix.append(seconds)
        yardstick.append(run_python("-c", YARDSTICK)[1])

    assert min(matrix) < 2.5 * min(yardstick)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        pytest.param(["matrix", "--arch", "sm80"], 2, "arch 'sm80' is unknown. Allowed: sm90a", id="unknown arch"),
        pytest.param(["matrix", "--select", "fwd-sm90a-e4m3-hd128-full"], 2, "fp8 kernels exist for", id="refused"),
        pytest.param(
            ["matrix", "--select", "*hd77*"], 3, "matches no variant. `fa4build list --grid`", id="nothing selected"
        ),
        pytest.param(["list", "--select", "fwd-sm90-*"], 3, "Did you mean 'fwd-sm90a-*'?", id="misspelled pattern"),
        pytest.param(
            ["explain", "fwd-sm90-bf16-hd64-ful"], 2, "Did you mean fwd-sm90a-bf16-hd64-full?", id="misspelled id"
        ),
        pytest.param(["wheel", "--sample"], 2, "--sample needs --dry-run", id="sample alone"),
        pytest.param(["matrix", "--select", "*-softcap-sink"], 3, "have no kernel yet", id="not written"),
        pytest.param(["matrix", "--assert-cached"], 11, "are not in the cache", id="not cached"),
        pytest.param(["wheel", "--arch", "sm90", "--assert-cached"], 11, "are not in the cache", id="wheel not cached"),
        pytest.param(["explain", "fwd-sm90a"], 2, "fwd-sm90a", id="bad id"),
        pytest.param(["inspect", "none.whl"], 8, "none.whl", id="no file"),
        pytest.param(["cache", "info", "abc"], 3, "no entry has this key or id", id="no such entry"),
        pytest.param(["cache", "export", "x.tar"], 3, "nothing to export", id="nothing to export"),
        pytest.param(["matrix", "--shard", "5/4"], 2, "1 <= I <= N", id="bad shard"),
        pytest.param(["matrix", "--shard", "0/4"], 2, "1 <= I <= N", id="shard from zero"),
        pytest.param(["matrix", "--jobs", "0"], 2, "--jobs", id="no jobs"),
        pytest.param(["verify", "--mutate"], 2, "name the kernels", id="mutants of everything"),
        pytest.param(["verify", "--mutate", "--timing", "x"], 2, "give one of them", id="two aims"),
        pytest.param(["verify", "--coverage", "--static"], 2, "--coverage verifies nothing", id="aim and level"),
        pytest.param(["matrix", "--spec", "none.toml"], 2, "none.toml", id="no spec"),
        pytest.param(["cache", "prune", "--max-size", "2X"], 2, "write it like 2G", id="bad size"),
        pytest.param(["wheel", "--no-runtime", "--platform", "x86_64"], 2, "give one of the two", id="contradiction"),
        pytest.param(
            ["wheel", "--no-runtime", "--single-file"], 2, "leave out --no-runtime", id="single without runtime"
        ),
        pytest.param(["wheel", "--sign", "none.key"], 12, "none.key: no private key", id="no key"),
        pytest.param(["coverage", "."], 13, "no pack of our own kernels", id="no pack"),
        pytest.param(["matrix", "--remote-cache-write"], 2, "needs --remote-cache", id="write without a remote"),
        pytest.param(["bundle", "out", "--arch", "sm90", "--assert-cached"], 11, "not in the cache", id="bundle"),
        pytest.param(["lst"], 2, "There is no command 'lst'. Did you mean list", id="unknown command"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["", "json"])
def test_an_error_is_one_message_and_a_code_and_leaves_no_trace(fa4build, tmp_path, arguments, code, reason, as_json):
    """On stderr; stdout stays empty, and with --json is one document that says the same. No traceback."""
    done = fa4build(*arguments, *(["--json"] if as_json else []))

    assert done.code == code
    assert reason in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
    if as_json:
        document = json.loads(done.out)
        assert (document["schema"], document["error"]["exit_code"]) == (1, code)
        assert reason in document["error"]["message"]
    else:
        assert done.out == ""


def test_with_json_an_error_lists_every_variant_that_is_missing(fa4build):
    """The text names five; other programs get all of them."""
    document = json.loads(fa4build("matrix", "--arch", "sm90", "--assert-cached", "--json").out)
    ids = [variant.id for variant in default_variants() if variant.arch == "sm90a"]

    assert document["error"]["kind"] == "NotCachedError"
    assert document["error"]["ids"] == ids


def test_the_advice_about_a_missing_kernel_builds_that_kernel_alone(fa4build):
    """Not the whole matrix."""
    done = fa4build("matrix", "--select", VARIANT_ID, "--assert-cached")

    assert done.err.strip().endswith(f"Run: fa4build matrix --select {VARIANT_ID}")


def test_variables_that_steer_the_compiler_are_an_error(fa4build, monkeypatch):
    """Before anything is compiled."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    done = fa4build("matrix", "--arch", "sm90")

    assert done.code == errors.ToolchainError.exit_code
    assert "CUTE_DSL_ARCH=sm_80" in done.err


def test_ctrl_c_says_that_nothing_is_lost(fa4build, monkeypatch):
    """With the exit code shells use."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fa4build.pipeline.build_matrix", interrupt)
    done = fa4build("matrix", "--arch", "sm90")

    assert done.code == 130
    assert "run the same command again" in done.err


@pytest.mark.parametrize(
    ("arguments", "path", "advice"),
    [
        pytest.param(["matrix", "--cache-dir", "file/cache"], "file", "A part of the path is a file.", id="cache"),
        pytest.param(["key", "new", "--out", "/proc/x"], "/proc/x", "Choose another path.", id="key"),
        pytest.param(["cache", "export", "no/k.tar"], "no/k.tar", "mkdir -p no", id="export"),
        pytest.param(["report", "--out", "no/r.html"], "no/r.html", "mkdir -p no", id="report"),
    ],
)
def test_a_path_that_cannot_be_used_is_named_with_what_to_do(fa4build, tmp_path, arguments, path, advice):
    """The path that was asked for, never a temporary name; with the code of files."""
    (tmp_path / "file").write_text("")
    fill(tmp_path / "cache")
    selected = ["--select", VARIANT_ID] if arguments[0] in ("matrix", "report") else []
    done = fa4build(*arguments, *selected)

    assert done.code == errors.FileError.exit_code, done.err
    assert path in done.err
    assert advice in done.err
    assert ".tmp" not in done.err
    assert "Traceback" not in done.err


# --- looking ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_what_would_be_compiled_and_leaves_no_trace(fa4build, tmp_path):
    """One line a variant, then the sum; as JSON the same."""
    done = fa4build("matrix", "--select", VARIANT_ID, "--dry-run")
    document = json.loads(fa4build("matrix", "--select", VARIANT_ID, "--dry-run", "--json").out)

    assert done.out.splitlines()[0] == f"missing  {VARIANT_ID}"
    assert done.out.splitlines()[-1].startswith("1 variants: 0 cached, 1 to compile")
    assert document["counts"] == {"cached": 0, "missing": 1}
    assert [row["id"] for row in document["variants"]] == [VARIANT_ID]
    assert list(tmp_path.iterdir()) == []


def test_what_is_cached_is_found_and_not_compiled(fa4build, tmp_path):
    """By dry run, assertion and build alike."""
    key = fill(tmp_path / "cache")
    dry = fa4build("matrix", "--select", VARIANT_ID, "--dry-run")
    asserted = fa4build("matrix", "--select", VARIANT_ID, "--assert-cached", "--json")
    built = fa4build("matrix", "--select", VARIANT_ID, "--json")
    (outcome,) = json.loads(built.out)["variants"]

    assert dry.out.startswith(f"cached   {VARIANT_ID}")
    assert (asserted.code, json.loads(asserted.out)["counts"]) == (0, {"cached": 1, "missing": 0})
    assert (outcome["status"], outcome["key"], outcome["seconds"]) == ("cached", key, 0.0)


def test_shards_take_turns(fa4build):
    """The two halves of the matrix, told apart by --dry-run."""
    ids = []
    for part in ("1/2", "2/2"):
        document = json.loads(fa4build("matrix", "--arch", "sm90", "--shard", part, "--dry-run", "--json").out)
        ids.append([row["id"] for row in document["variants"]])
    whole = [variant.id for variant in default_variants() if variant.arch == "sm90a"]

    assert ids == [whole[0::2], whole[1::2]]


def test_list_tells_the_state_of_every_variant(fa4build, tmp_path):
    """Cached, implemented, opt-in, planned; and unsupported ones with their reasons."""
    fill(tmp_path / "cache")
    rows = json.loads(fa4build("list", "--select", "*-sm90a-bf16-hd128-causal*", "--all", "--json").out)["variants"]
    status = {row["id"]: row["status"] for row in rows}
    refused = json.loads(fa4build("list", "--select", "fwd-sm90a-e4m3-hd128-full", "--unsupported", "--json").out)[
        "variants"
    ]

    assert status[VARIANT_ID] == "cached"
    assert status["bwd-sm90a-bf16-hd128-causal"] == "implemented"
    assert status["bwd-sm90a-bf16-hd128-causal-deterministic-softcap"] == "opt-in"
    assert status["fwd-sm90a-bf16-hd128-causal-softcap-sink"] == "planned"
    assert refused[0]["reasons"] == ["fp8 kernels exist for sm100a and sm103a only; choose bf16 or fp16 on sm90a"]


def test_list_says_a_reason_once_and_ends_with_totals(fa4build):
    """A number stands for a reason; the last line counts the states."""
    lines = fa4build("list", "--select", "fwd-sm90a-*-softcap").out.splitlines()
    reasons = [line for line in lines if line.startswith("[")]

    assert len(reasons) == len(set(reasons)) == 1
    assert any(line.endswith("[1]") for line in lines)
    assert re.fullmatch(r"\d+ variants: \d+ implemented, \d+ opt-in", lines[-1])


def test_list_shows_the_matrix_as_a_grid(fa4build, tmp_path):
    """A row for each combination of features, a column for each head dim, a sign for each mask of each dtype."""
    fill(tmp_path / "cache")
    lines = fa4build("list", "--grid", "--select", "fwd-sm90a-bf16-*").out.splitlines()

    assert lines[0].split() == ["fwd,", "sm90a", "64", "96", "128", "192x128", "256"]
    assert re.split(r"  +", lines[1]) == ["dense", "ooo", "ooo", "o#o", "ooo", "ooo"]
    assert lines[-2] == "# cached, o implemented, + opt-in, . planned"


def test_in_a_terminal_tables_fit_and_in_a_pipe_nothing_is_cut(monkeypatch, capsys):
    """Ids lose their middle, which is most alike."""
    rows = [("fwd-sm90a-bf16-hd128-causal-varlen-split-softcap", "a" * 30)]
    print_table(("variant", "key"), rows)
    whole = capsys.readouterr().out
    monkeypatch.setattr("fa4build.cli.output.width_of_terminal", lambda: 60)
    print_table(("variant", "key"), rows)
    cut = capsys.readouterr().out

    assert rows[0][0] in whole
    assert max(map(len, cut.splitlines())) <= 60
    assert cut.splitlines()[1].startswith("fwd-sm90a-bf16")
    assert "…" in cut


def test_no_color_is_obeyed(monkeypatch):
    """NO_COLOR, and colour only for words that have one."""
    assert status("failed") == "\x1b[31mfailed\x1b[0m"
    assert status("written") == "written"
    monkeypatch.setenv("NO_COLOR", "1")
    assert status("failed", 8) == "failed  "


def test_explain_tells_what_was_compiled(fa4build, tmp_path):
    """Tuning with its source, and the facts of the cubin; for a refused variant the reasons."""
    before = json.loads(fa4build("explain", VARIANT_ID, "--json").out)
    key = fill(tmp_path / "cache")
    after = json.loads(fa4build("explain", VARIANT_ID, "--json").out)
    text = fa4build("explain", VARIANT_ID).out
    refused = fa4build("explain", "fwd-sm90a-e4m3-hd128-full")

    assert (before["status"], before["compiled"]) == ("implemented", None)
    assert (after["status"], after["compiled"]["key"], after["compiled"]["registers"]) == ("cached", key, 168)
    assert after["tuning"]["source"] in text
    assert "168 registers" in text
    assert (refused.code, "unsupported: fp8 kernels exist" in refused.out) == (0, True)


def test_a_dry_run_of_wheel_names_the_wheels_and_what_is_missing(fa4build, tmp_path):
    """One pack a target, one runtime a host; nothing is compiled or written."""
    done = fa4build("wheel", "--select", VARIANT_ID, "--dry-run", "--json")
    packs = fa4build("wheel", "--select", VARIANT_ID, "--dry-run", "--no-runtime")

    assert json.loads(done.out) == {
        "schema": 1,
        "out_dir": "dist",
        "wheels": [
            "fa4-kernels-sm90a",
            "fa4-kernels (manylinux_2_28_x86_64)",
            "fa4-kernels (manylinux_2_28_aarch64)",
        ],
        "variants": 1,
        "limit": 100_000_000,
        "packs": [
            {
                "name": "fa4-kernels-sm90a",
                "num_kernels": 1,
                "num_sampled": 0,
                "size": None,
                "missing": [VARIANT_ID],
            }
        ],
        "missing": [VARIANT_ID],
    }
    assert packs.out.splitlines() == [
        "would write fa4-kernels-sm90a into dist/: size unknown, estimated from 0 of 1 kernels",
        f"would compile {VARIANT_ID}",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_one_command_and_signed_by_the_key_it_is_given(fa4build, tmp_path):
    """Key, bundle and packs from what is compiled; the packs inside carry the signature; a second run is equal."""
    fill(tmp_path / "cache")
    (tmp_path / "cache" / "zig").symlink_to(COMPILER_CACHE)
    key = json.loads(fa4build("key", "new", "--json").out)
    arguments = ("--select", VARIANT_ID, "--platform", "x86_64", "--sign", "release.key", "--assert-cached")
    done = fa4build("bundle", "out", *arguments, "--json")
    assert done.code == 0, done.err
    first = (tmp_path / "out" / "SHA256SUMS").read_bytes()
    again = fa4build("bundle", "out", *arguments)
    (pack,) = (tmp_path / "out" / "wheels").glob("*none-any.whl")

    assert done.code == again.code == 0, done.err + again.err
    assert json.loads(done.out)["key_id"] == key["key_id"]
    assert json.loads(fa4build("inspect", str(pack), "--json").out)["facts"]["signed_by"] == [key["key_id"]]
    assert (tmp_path / "out" / "SHA256SUMS").read_bytes() == first
    assert (tmp_path / "release.key").stat().st_mode & 0o777 == 0o600
    assert fa4build("key", "new").code == errors.KeyFileError.exit_code
    assert key["key_id"] in fa4build("key", "show", "release.pub").out
    assert fa4build("key", "show", "release.key").out == fa4build("key", "show", "release.pub").out


PLAN = (
    '{"format": "fa4build.launchplan", "version": 1, "origin": {"kind": "handwritten"}, "spec": {}, "args": [],'
    ' "nodes": [["const", "i64", 1]], "guards": [], "vectors": [], "launches": [{"kernel": "k_0", "grid": [0, 0, 0],'
    ' "block": [128, 1, 1], "cluster": [1, 1, 1], "smem": 4096, "pdl": false, "cooperative": false, "params": []}]}'
)


def test_inspect_shows_facts_and_parts(fa4build, tmp_path):
    """For people a line a fact and a table; as JSON the same."""
    (tmp_path / "plan.json").write_text(PLAN)
    text = fa4build("inspect", "plan.json").out.splitlines()
    document = json.loads(fa4build("inspect", "plan.json", "--json").out)

    assert text[0] == "launch plan: plan.json"
    assert any("k_0" in line and "4096" in line for line in text)
    assert document["kind"] == "launch plan"
    assert document["rows"][0]["kernel"] == "k_0"


# --- the cache --------------------------------------------------------------------------------------------------------


def test_cache_commands_on_a_filled_cache(fa4build, tmp_path):
    """ls, info, verify, export, import and prune, one after another."""
    key = fill(tmp_path / "cache")
    listed = json.loads(fa4build("cache", "ls", "--json").out)["entries"]
    one = json.loads(fa4build("cache", "info", key[:8], "--json").out)["entries"]

    assert [(entry["id"], entry["key"]) for entry in listed] == [(VARIANT_ID, key)]
    assert one[0]["inputs"]["source"]["variant"]["head_dim"] == 128
    assert VARIANT_ID in fa4build("cache", "ls").out
    assert json.loads(fa4build("cache", "info", "--json").out)["entries"] == 1
    assert fa4build("cache", "verify").code == 0
    assert json.loads(fa4build("cache", "export", "x.tar", "--json").out)["exported"] == 1
    assert fa4build("cache", "import", "x.tar", "--cache-dir", "elsewhere").code == 0
    assert Cache(tmp_path / "elsewhere").entries() == Cache(tmp_path / "cache").entries()
    assert json.loads(fa4build("cache", "prune", "--max-size", "1B", "--json").out)["removed_entries"] == 1
    assert json.loads(fa4build("cache", "ls", "--json").out)["entries"] == []


def test_verify_fails_on_damage(fa4build, tmp_path):
    """It names the variant and the file; with --json also on stdout."""
    fill(tmp_path / "cache")
    (path,) = [
        path for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file() and path.read_bytes() == b"log"
    ]
    path.chmod(0o644)
    path.write_bytes(b"lag")
    done = fa4build("cache", "verify", "--json")

    assert done.code == errors.CacheCorruptError.exit_code
    assert str(path) in json.loads(done.out)["problems"][0]
    assert VARIANT_ID in done.err


def test_damage_found_on_the_way_is_a_warning(fa4build, tmp_path):
    """On stderr; the variant counts as missing."""
    fill(tmp_path / "cache")
    for path in (tmp_path / "cache" / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1])
    done = fa4build("matrix", "--select", VARIANT_ID, "--dry-run")

    assert "fa4build: warning: cache entry" in done.err
    assert done.out.startswith("missing")


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.dsl
def test_doctor_says_that_this_machine_can_build(fa4build, tmp_path):
    """Every check passes where these tests run, and nothing is left behind."""
    done = fa4build("doctor", "--json")
    checks = {check["subject"]: check for check in json.loads(done.out)["checks"]}

    assert {name for name, check in checks.items() if check["status"] == "failed"} == set()
    assert done.code == 0
    assert checks["compiler starts"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []
