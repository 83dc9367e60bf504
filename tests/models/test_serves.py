"""Contract of `python -m fa4_kernels serves CONFIG` and of `explain`: what an install answers, without GPU and torch.

Status 0: every layer has its kernels in every use that was asked about; 1: not; 2: a wrong argument. What is missing
comes with the command that builds it, and every id in it is one that the builder knows.
"""

from pathlib import Path

import pytest

from fa4build.matrix.arch import arch_named
from fa4build.matrix.planning import plan_of_files
from fa4build.matrix.problems import problem_of
from fa4build.matrix.variants import parse_variant, variant_axes, written_variants
from fa4build.runtime.fa4_kernels import __main__ as command
from fa4build.runtime.fa4_kernels.dispatch import variant_id
from fa4build.runtime.fa4_kernels.models.needs import Use
from fa4build.runtime.fa4_kernels.packs import Blob, Entry, Manifest, Pack, RefusedPack

CONFIGS = Path(__file__).with_name("configs")
BOTH = [str(CONFIGS / "gpt-oss-120b.json"), str(CONFIGS / "Qwen3-32B.json")]
NOTHING = Blob(group=0, offset=0, size=1, sha256="")


def pack_of(ids: tuple[str, ...]) -> Pack:
    """A pack that says it has these kernels."""
    entries = []
    for name in ids:
        variant = parse_variant(name)
        target = arch_named(variant.arch).target
        entries.append(
            Entry(id=name, op=variant.op, target=target, axes=variant_axes(variant), cubin=NOTHING, plan=NOTHING,
                  symbols=(), evidence={})
        )  # fmt: skip
    targets = tuple(dict.fromkeys(entry.target for entry in entries))
    manifest = Manifest(pack="p", version="1", targets=targets, groups=(), entries=tuple(entries))
    return Pack(manifest=manifest, directory=Path())


@pytest.fixture
def serves(monkeypatch, capsys):
    """Runs `serves` with these kernels installed: (status, stdout, stderr)."""

    def run(ids: tuple[str, ...], *arguments: str) -> tuple[int, str, str]:
        packs = (pack_of(ids),) if ids else ()
        monkeypatch.setattr(command, "installed_packs", lambda trust: packs)
        status = command.main(["serves", *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("use", [Use(page_size=16), Use(), Use(purpose="training")], ids=str)
@pytest.mark.parametrize("gpu", ["H200", "B200", "B300"])
def test_what_is_planned_is_complete_and_without_any_of_it_is_not(serves, gpu, use):
    """The plan and the dispatcher look for the same; every planned kernel is needed."""
    ids = plan_of_files(BOTH, [gpu], use).ids
    asked = [*BOTH, "--gpu", gpu, "--for", use.purpose, *(["--page-size", "16"] if use.page_size else [])]
    if use.page_size is None and use.purpose == "serving":
        ids = (*ids, *plan_of_files(BOTH, [gpu], Use(page_size=16)).ids)

    status, text, _ = serves(ids, *asked)

    assert 0 == status, text
    assert "NOT complete" not in text
    for name in ids:
        status, text, _ = serves(tuple(other for other in ids if other != name), *asked)
        assert 1 == status
        assert name in text.partition("missing: ")[2]


def test_every_kernel_is_named_with_its_evidence_and_a_gap_with_the_command(serves):
    """One line a problem; and what to run."""
    status, text, _ = serves(
        ("fwd-sm90a-bf16-hd64-local-paged-sink",), BOTH[0], "--page-size", "16", "--for", "serving"
    )

    assert 1 == status
    assert "H200 (sm_90a), serving, pages of 16: NOT complete" in text
    assert " 18 prefill and decoding, pages: fwd-sm90a-bf16-hd64-local-paged-sink (none)" in text
    assert " 18 merges KV splits: no kernel for fwd_combine, dense, bf16, head_dim 64, mask full, sink" in text
    assert (
        "missing: fwd-sm90a-bf16-hd64-causal-paged-sink, fwd-sm90a-bf16-hd64-causal-paged-split, fwd_combine-" in text
    )
    assert f"build them: fa4build wheel --model {BOTH[0]} --gpu H200 --page-size 16" in text


def test_all_uses_are_asked_about_unless_one_is_named(serves):
    """Without pages, with pages, training; prefill and decoding are within the first two."""
    _, text, _ = serves((), BOTH[1], "--gpu", "b200")

    heads = [line for line in text.splitlines() if line.startswith("B200")]
    assert ["serving, a cache without pages", "serving, pages of 16", "training"] == [
        line.partition("), ")[2].rpartition(":")[0] for line in heads
    ]


def test_a_layer_that_no_kernel_can_answer_is_named_and_never_complete(serves):
    """Chunks of Llama 4, a tower of an unknown type."""
    status, text, _ = serves((), str(CONFIGS / "Qwen3-32B.json"), "--gpu", "H200", "--cache-dtype", "fp8")

    assert 1 == status
    assert " 64 no kernel can be asked for: the cache is e4m3, and fp8 kernels need" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "missing.json: cannot be read as a model's configuration"),
        ([BOTH[0], "--gpu", "A100"], "GPU 'A100' is unknown"),
        ([BOTH[0], "--page-size", "0"], "page_size is 0"),
        ([BOTH[0], "--tp", "7"], "cannot be shared by 7 ranks"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(serves, arguments, message):
    """Nothing is answered about what was not asked."""
    status, _, text = serves(("fwd-sm90a-bf16-hd64-full",), *arguments)

    assert 2 == status
    assert message in text


def test_without_a_pack_the_gpu_must_be_named(serves, monkeypatch, capsys):
    """Which one would be a guess; a refused pack is told with its reason."""
    status, _, text = serves((), BOTH[0])
    assert 2 == status
    assert "no pack is installed. Give the GPU" in text

    monkeypatch.setattr(command, "installed_packs", lambda trust: (RefusedPack(name="old", reason="is of ABI 0"),))
    assert 1 == command.main(["serves", BOTH[0], "--gpu", "H200"])
    assert "pack old is not used: is of ABI 0" in capsys.readouterr().out


def test_explain_knows_every_axis(monkeypatch, capsys):
    """Op, layout or pages, sink, soft cap, split keys, which are two problems, and the GPU by its name."""
    ids = ("fwd-sm90a-bf16-hd64-causal-paged-split", "fwd_combine-sm90a-bf16-hd64-sink", "bwd-sm90a-bf16-hd64-causal")
    monkeypatch.setattr(command, "installed_packs", lambda trust: (pack_of(ids),))
    common = ["explain", "--head-dim", "64", "--mask", "causal"]

    assert 0 == command.main([*common, "--pages", "--split", "--sink", "--gpu", "h200"])
    text = capsys.readouterr().out
    assert ids[0] in text
    assert ids[1] in text
    assert 0 == command.main([*common, "--op", "bwd"])
    assert 1 == command.main([*common, "--layout", "varlen", "--softcap"])
    capsys.readouterr()
    assert 2 == command.main([*common, "--gpu", "Voodoo"])
    assert "GPU 'Voodoo' is unknown" in capsys.readouterr().err


def test_the_id_of_a_problem_is_one_that_the_builder_has():
    """Of every problem that a written variant answers: helpers have no mask, wide kernels of Blackwell two CTAs."""
    written = set(written_variants())
    for problem, arch in {(problem_of(variant), variant.arch) for variant in written}:
        named = parse_variant(variant_id(problem, arch_named(arch).target))

        assert problem == problem_of(named)
        assert named in written
