"""Contract of `fa4build plan` and of `--model`, `--gpu` and `--spec` of other commands.

A plan names the kernels of every layer, each with its reason, and what has none with its layers; written as a
specification it selects the same. Models and specifications add up. A wrong file, GPU or use is one error of code 2.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fa4build import cli, errors
from fa4build.matrix.selection import Selection
from fa4build.matrix.spec import read_spec
from fa4build.matrix.variants import expand_matrix

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
GPT_OSS, QWEN = str(CONFIGS / "gpt-oss-120b.json"), str(CONFIGS / "Qwen3-32B.json")
SERVING = ["--gpu", "h200", "--page-size", "16"]
IDS = [
    "fwd-sm90a-bf16-hd128-causal-paged",
    "fwd-sm90a-bf16-hd128-causal-paged-split",
    "fwd-sm90a-bf16-hd64-causal-paged-sink",
    "fwd-sm90a-bf16-hd64-causal-paged-split",
    "fwd-sm90a-bf16-hd64-local-paged-sink",
    "fwd_combine-sm90a-bf16-hd128",
    "fwd_combine-sm90a-bf16-hd64-sink",
]
"""Of both models on an H200, over pages: seven kernels for a hundred layers."""


@pytest.fixture
def fa4build(capsys, monkeypatch, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA4BUILD_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return ended.value.code, *capsys.readouterr()

    return run


def listed(out: str) -> set[str]:
    """Ids of `list` or `matrix --dry-run`."""
    return {line.split()[-1] for line in out.splitlines() if "-sm" in line}


def test_a_plan_says_which_kernels_why_each_and_for_how_many_layers(fa4build):
    """Of both models in one table; the last lines sum it up and say how to go on."""
    code, out, _ = fa4build("plan", GPT_OSS, QWEN, *SERVING, "--tp", "8")

    assert 0 == code
    assert "18 of 64/8 heads of 64, local window 127 left, sink; 8/1 a rank" in out
    assert IDS == [line.split()[0] for line in out.splitlines() if line.startswith("fwd")]
    assert "18  decoding with split-KV, pages: gpt-oss-120b" in out
    assert "7 kernels for H200; none compiled yet; every layer has a kernel" in out
    assert f"build: fa4build wheel --model {GPT_OSS} --model {QWEN} --gpu H200 --page-size 16 --tp 8" in out


def test_the_specification_of_a_plan_selects_the_plan(fa4build):
    """With the reasons as comments; on the command line `--model` selects the same."""
    code, out, _ = fa4build("plan", GPT_OSS, QWEN, *SERVING, "--write-spec", "serving.toml")

    assert 0 == code
    assert "serving.toml: 7 variants" in out
    assert set(IDS) == {variant.id for variant in expand_matrix(Selection(specs=(Path("serving.toml"),)))}
    assert "# gpt-oss-120b: merges KV splits (18 layers)" in Path("serving.toml").read_text()
    assert "serving.toml" == read_spec(Path("serving.toml")).path
    _, out, _ = fa4build("matrix", "--dry-run", "--model", GPT_OSS, "--model", QWEN, *SERVING)
    assert set(IDS) == listed(out.rpartition("\n7 variants")[0])


def test_models_and_specifications_add_up(fa4build):
    """Two files and a model; --select and --arch narrow what they name."""
    Path("a.toml").write_text('edition = 1\nselect = ["fwd-sm90a-bf16-hd96-full"]\n')
    Path("b.toml").write_text('edition = 1\nselect = ["fwd-sm100a-bf16-hd96-full"]\n')
    _, out, _ = fa4build("list", "--spec", "a.toml", "--spec", "b.toml", "--model", GPT_OSS, *SERVING)

    two = {"fwd-sm90a-bf16-hd96-full", "fwd-sm100a-bf16-hd96-full"}
    assert two | {name for name in IDS if "hd64" in name} == listed(out)
    _, out, _ = fa4build("list", "--spec", "a.toml", "--spec", "b.toml", "--arch", "sm100")
    assert {"fwd-sm100a-bf16-hd96-full"} == listed(out)


def test_what_has_no_kernel_is_named_with_its_layers(fa4build):
    """A head dim, a sink of (192, 128) over pages, an unknown tower; in the plan, in JSON, and on stderr of others."""
    vision = {"model_type": "novel_vit", "num_hidden_layers": 40}
    text = {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 256}
    Path("m.json").write_text(json.dumps({"model_type": "x", "text_config": text, "vision_config": vision}))
    Path("mimo.json").write_text(json.dumps({"model_type": "mimo_v2_flash", "num_hidden_layers": 6}))
    lines = {
        "m, vision (novel_vit) on H200: 40 layers: model_type 'novel_vit' is not in the table of known models",
        "m, text (gemma4_text) on H200: 1 layer: prefill and decoding, pages: no kernel has hd512",
        "mimo, mimo_v2_flash on H200: 4 layers: prefill and decoding, pages: no fwd kernel of sm90a has paged",
    }
    code, out, _ = fa4build("plan", "m.json", "mimo.json", *SERVING)

    assert 0 == code
    assert all(f"without a kernel: {line}" in out for line in lines), out
    _, out, _ = fa4build("plan", "m.json", "mimo.json", *SERVING, "--json")
    unserved = json.loads(out)["unserved"]
    assert {40, 1, 4} <= {lack["layers"] for lack in unserved}
    _, _, err = fa4build("list", "--model", "m.json", *SERVING)
    assert "without a kernel: m, vision (novel_vit) on H200: 40 layers" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", GPT_OSS], "no GPU was given. Add --gpu H200"),
        (["plan", GPT_OSS, "--gpu", "A100"], "GPU 'A100' is unknown. Allowed: H200, "),
        (["plan", "gone.json", "--gpu", "H200"], "gone.json: cannot be read as a model's configuration"),
        (["plan", GPT_OSS, "--gpu", "H200", "--tp", "5"], "cannot be shared by 5 ranks"),
        (["plan", GPT_OSS, "--gpu", "H200", "--cache-dtype", "int4"], "cache dtype 'int4' is unknown"),
        (["matrix", "--model", GPT_OSS, "--dry-run"], "no GPU was given."),
        (["list", "--gpu", "Voodoo"], "GPU 'Voodoo' is unknown"),
        (["list", "--family", "quack", "--model", QWEN, *SERVING], "--spec and --model describe variants of fa4"),
    ],
)
def test_a_wrong_request_is_one_error_of_code_2(fa4build, arguments, message):
    """What, the value, what is allowed."""
    code, out, err = fa4build(*arguments)

    assert (errors.VariantError.exit_code, "") == (code, out)
    assert message in err


def test_a_model_of_which_nothing_can_be_built_writes_nothing(fa4build):
    """Code 3, with the reasons."""
    Path("t5.json").write_text('{"model_type": "t5"}')
    code, _, err = fa4build("plan", "t5.json", *SERVING, "--write-spec", "t5.toml")

    assert errors.NothingSelectedError.exit_code == code
    assert "no kernel can be planned: t5, t5 on H200: 6 layers: a bias for each pair of positions" in err
    assert not Path("t5.toml").exists()


def test_a_gpu_stands_for_its_target(fa4build):
    """`--gpu B200` is `--arch sm100`, in any case."""
    _, by_gpu, _ = fa4build("list", "--gpu", "nvidia b200", "--select", "*-hd64-full")
    _, by_arch, _ = fa4build("list", "--arch", "sm100", "--select", "*-hd64-full")

    assert by_arch == by_gpu
    assert "sm100a" in by_gpu


def test_a_pattern_takes_what_has_a_kernel_and_says_what_it_leaves_out(fa4build):
    """One line on stderr; an exact id without a kernel is an error."""
    pattern = "fwd-sm90a-bf16-hd64-causal-paged-s*"
    code, out, err = fa4build("matrix", "--select", pattern, "--dry-run")

    assert 0 == code
    assert "fwd-sm90a-bf16-hd64-causal-paged-split-softcap" in listed(out)
    assert "skipped 1 of 5 matching variants, which have no kernel: no fwd kernel of sm90a has softcap with sink" in err
    helpers = "fwd_combine-sm90a-bf16-hd64, fwd_combine-sm90a-bf16-hd64-sink"
    assert f"with {helpers}, which the selected kernels are launched with" in err
    code, _, err = fa4build("matrix", "--select", "fwd-sm90a-bf16-hd64-causal-paged-softcap-sink", "--dry-run")
    assert errors.NothingSelectedError.exit_code == code
    assert "have no kernel yet: fwd-sm90a-bf16-hd64-causal-paged-softcap-sink" in err


def test_a_specification_that_excludes_a_helper_is_refused(fa4build):
    """The kernel could not be called."""
    Path("s.toml").write_text(
        'edition = 1\nselect = ["*-sm90a-bf16-hd64-causal-paged-split"]\nexclude = ["*combine*"]\n'
    )
    code, _, err = fa4build("matrix", "--spec", "s.toml", "--dry-run")

    assert errors.NothingSelectedError.exit_code == code
    assert "s.toml: `exclude` removes fwd_combine-sm90a-bf16-hd64, which fwd-sm90a-bf16-hd64-causal" in err


def test_other_families_are_listed_and_reported(fa4build):
    """Their declared kernels, with their state."""
    code, out, _ = fa4build("list", "--family", "quack", "--arch", "sm90", "--json")

    assert 0 == code
    rows = json.loads(out)["variants"]
    assert {"implemented"} == {row["status"] for row in rows}
    code, out, _ = fa4build("report", "--family", "quack", "--arch", "sm90", "--json", "--benchmarks", "none")
    assert 0 == code
    assert {row["id"] for row in rows} >= {row["id"] for row in json.loads(out)["variants"]} > set()


def test_a_report_is_about_what_is_selected(fa4build):
    """The kernels of a model alone."""
    code, out, _ = fa4build("report", "--json", "--benchmarks", "none", "--model", GPT_OSS, *SERVING)

    assert 0 == code
    document = json.loads(out)
    assert {name for name in IDS if "hd64" in name} == {row["id"] for row in document["variants"]}
    assert {("fwd", 3), ("fwd_combine", 1)} == {(row["op"], row["implemented"]) for row in document["coverage"]}
