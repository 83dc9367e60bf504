"""Contract of the closure proof.

Every problem of the declared domain is counted once: served by a kernel that computes it, or refused for a reason. A
written variant that no pack holds, an entry that nothing reaches, and an answer of another meaning make the packs not
closed, each by name. The dispatcher that is asked is the runtime's own.
"""

import dataclasses
import json
import random
import time
from pathlib import Path

import pytest

from fa4build import cli
from fa4build.errors import CoverageError
from fa4build.matrix.arch import ARCHES, Arch, arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.planning import plan_of_files
from fa4build.matrix.variants import default_variants, parse_variant, valid_variants, variant_axes, written_variants
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.runtime.fa4_kernels.dispatch import Device, Problem, dispatch, steps_of
from fa4build.runtime.fa4_kernels.models.needs import Use
from fa4build.runtime.fa4_kernels.packs import Pack
from fa4build.shipping.bundle import write_bundle
from fa4build.shipping.coverage import _domain, cover, installed_form, key_of, narrowed, problem_of
from fa4build.shipping.pack import Artifact, build_pack, write_pack
from fa4build.shipping.wheel import prepare_pack_wheel
from tests.artifacts import TOOLCHAIN, made_up_artifact, proven, with_code

ARCH = arch_named("sm90")


def written_for(arch: Arch) -> tuple[Variant, ...]:
    """What a complete pack of a target holds."""
    return tuple(variant for variant in written_variants() if variant.arch == arch.name)


WRITTEN = written_for(ARCH)


def artifact_of(variant, **axes: object) -> Artifact:
    """A made-up compile of a variant, its axes as the builder writes them unless changed."""
    facts = dataclasses.replace(
        made_up_artifact().facts,
        id=variant.id,
        op=variant.op,
        target=arch_named(variant.arch).target,
        axes={**variant_axes(variant), **axes},
    )
    return with_code(facts, variant.id.encode())


def packed(artifacts: list[Artifact], directory: Path) -> tuple[Pack, ...]:
    """A pack of these as the runtime sees it."""
    pack = build_pack(artifacts, pack="fa4-kernels-sm90a", version="0.1.0", abi=ABI_HASH, toolchain=TOOLCHAIN)
    return installed_form([write_pack(pack, directory)])


@pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: arch.name)
def test_the_complete_pack_is_closed(tmp_path: Path, arch: Arch) -> None:
    """Every written variant serves its own problem or is an alternative, and the counts add up to the domain."""
    written = written_for(arch)
    coverage = cover(packed([artifact_of(variant) for variant in written], tmp_path))
    without = (coverage.unwritten_problems, coverage.missing_problems, coverage.other_targets, coverage.composed)
    without = (*without, coverage.on_request)

    assert coverage.is_closed, (coverage.wrong, coverage.orphans)
    assert {*coverage.served, *coverage.alternatives} == {variant.id for variant in written}
    assert sum(coverage.served.values()) + sum(coverage.refused.values()) + sum(without) == coverage.num_problems
    assert coverage.missing_problems == 0
    assert coverage.targets == (arch.target,)


def test_the_default_matrix_is_closed(tmp_path: Path) -> None:
    """Problems whose kernels are built on request alone are refused for that reason, and asked for by name, missing."""
    default = [variant for variant in default_variants() if variant.arch == "sm90a"]
    pack = packed([artifact_of(variant) for variant in default], tmp_path)
    named = next(variant for variant in written_for(ARCHES[0]) if variant not in default)

    assert cover(pack).is_closed
    assert cover(pack).on_request >= len(written_for(ARCHES[0])) - len(default)
    assert (named.id,) == cover(pack, [named]).missing


def test_the_domain_of_every_valid_variant_takes_seconds(tmp_path: Path) -> None:
    """As if all were written: closed as well. The enumeration has to stay usable in a build: 5 s of a processor."""
    variants = [variant for variant in valid_variants() if variant.arch == ARCH.name]
    packs = packed([artifact_of(variant) for variant in variants], tmp_path)
    start = time.process_time()
    coverage = cover(packs)

    assert (coverage.wrong, coverage.orphans) == ((), ())
    assert time.process_time() - start < 5


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The complete pack of one target."""
    directory = tmp_path_factory.mktemp("complete")
    packed([artifact_of(variant) for variant in WRITTEN], directory)
    return directory / "fa4_kernels_sm90a"


def split_problem(**changes: object) -> Problem:
    """bf16, head_dim 128, causal, with split keys."""
    base = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal", features=frozenset({"split"}))
    return dataclasses.replace(base, **changes)


def test_split_keys_are_answered_by_two_kernels() -> None:
    """Dense ones as packed ones; the sink joins where parts are merged; fp8 writes bf16, which is what is merged."""
    merge = Problem(op="fwd_combine", dtype="bf16", head_dim=128, head_dim_v=128)
    with_sink = frozenset({"split", "sink"})

    assert steps_of(split_problem()) == (split_problem(layout="varlen"), merge)
    assert steps_of(split_problem(layout="paged", dtype="e4m3")) == (split_problem(layout="paged", dtype="e4m3"), merge)
    assert steps_of(split_problem(layout="varlen", features=with_sink)) == (
        split_problem(layout="varlen"),
        dataclasses.replace(merge, features=frozenset({"sink"})),
    )
    assert steps_of(split_problem(features=frozenset())) == (split_problem(features=frozenset()),)


@pytest.mark.parametrize(
    ("ids", "composed"),
    [
        (["fwd-sm90a-bf16-hd128-causal-varlen-split", "fwd_combine-sm90a-bf16-hd128"], 1),
        (["fwd-sm90a-bf16-hd128-causal-varlen-split", "fwd_combine-sm90a-bf16-hd128-sink"], 2),
        (["fwd-sm90a-bf16-hd128-causal-varlen-split"], 0),
        (["fwd_combine-sm90a-bf16-hd128"], 0),
    ],
    ids=["dense", "a sink, dense and packed", "no merge", "no part"],
)
def test_a_problem_is_composed_if_all_its_steps_are_there(tmp_path: Path, ids: list[str], composed: int) -> None:
    """No kernel is for dense split keys; a sink with split keys is for no layout."""
    coverage = cover(packed([artifact_of(parse_variant(name)) for name in ids], tmp_path))

    assert coverage.composed == composed
    assert set(coverage.served) == set(ids)
    assert (coverage.wrong, coverage.orphans) == ((), ())


def test_a_deterministic_kernel_stands_in_but_is_no_substitute(tmp_path: Path) -> None:
    """It answers a call that asks for no order of sums, which is right but slower: the faster one is missing."""
    name = "bwd-sm100a-bf16-hd64-full"
    both = [
        artifact_of(parse_variant(name)),
        artifact_of(parse_variant(f"{name}-deterministic")),
    ]
    alone = cover(packed(both[1:], tmp_path / "alone"))
    together = cover(packed(both, tmp_path / "together"))

    assert alone.served == {both[1].facts.id: 2}
    assert alone.wrong == ()
    assert name in alone.missing
    assert together.served == {both[0].facts.id: 1, both[1].facts.id: 1}
    assert name not in together.missing


def test_every_valid_variant_is_in_the_domain() -> None:
    """As the answer to its own problem on its own target."""
    domain = _domain()
    arches = {arch.name: arch for arch in ARCHES}

    assert all(variant in domain[arches[variant.arch], problem_of(variant)][0] for variant in valid_variants())


def test_every_refusal_has_a_reason() -> None:
    """A problem without valid variants has at least one reason of the rule table."""
    assert all(valid or (reasons and all(reasons)) for valid, reasons in _domain().values())


def test_what_is_absent_is_named(tmp_path: Path) -> None:
    """One kernel left out of the pack of its target."""
    coverage = cover(packed([artifact_of(variant) for variant in WRITTEN[1:]], tmp_path))

    assert not coverage.is_closed
    assert coverage.missing == (WRITTEN[0].id,)
    assert coverage.missing_problems == 1


def test_what_was_asked_for_is_named_on_any_target(complete: Path) -> None:
    """Requested though there is no pack for it; not requested, it is another target's business."""
    packs = installed_form([complete])
    other = next(variant for variant in valid_variants() if variant.arch == "sm103a")

    assert cover(packs).missing == ()
    assert set(cover(packs, [other]).missing) <= {other.id}
    assert cover(packs, WRITTEN).is_closed


def test_an_entry_that_nothing_reaches_is_an_orphan(tmp_path: Path) -> None:
    """Two entries of one meaning: the dispatcher always takes the first by id, so the other is dead weight."""
    second = dataclasses.replace(artifact_of(WRITTEN[0]).facts, id=WRITTEN[0].id + "-zzz")
    copies = [
        *(artifact_of(variant) for variant in WRITTEN),
        with_code(second, b"second"),
    ]
    coverage = cover(packed(copies, tmp_path))

    assert coverage.orphans == (WRITTEN[0].id + "-zzz",)
    assert not coverage.is_closed


def test_an_entry_that_computes_the_same_by_other_means_is_an_alternative(tmp_path: Path) -> None:
    """Another cta_group: it is reached when it has more evidence than the first, so it is no dead weight."""
    plain = [artifact_of(variant) for variant in WRITTEN]
    causal = next(variant for variant in WRITTEN if variant.id == "fwd-sm90a-bf16-hd128-causal")
    name = causal.id + "-2cta"
    facts = dataclasses.replace(artifact_of(causal, cta_group=2).facts, id=name)
    twin = with_code(facts, b"twin")
    for more, reached in ((twin, False), (proven(twin, "simulated"), True)):
        packs = packed([*plain, more], tmp_path / str(reached))
        coverage = cover(packs)

        assert coverage.orphans == ()
        assert coverage.alternatives == ((causal.id,) if reached else (name,))


def test_an_answer_of_another_meaning_is_wrong(tmp_path: Path) -> None:
    """An entry whose axes say something else than its id."""
    causal, full = (parse_variant(f"fwd-sm90a-bf16-hd128-{mask}") for mask in ("causal", "full"))
    others = [artifact_of(variant) for variant in WRITTEN if variant not in (causal, full)]
    coverage = cover(packed([*others, artifact_of(causal, mask="full")], tmp_path))

    assert coverage.wrong == (f"{problem_of(full)} on sm_90a: {causal.id}",)
    assert coverage.missing_problems == 1  # the causal one has no kernel left
    assert not coverage.is_closed


def test_narrowing_changes_no_answer(complete: Path) -> None:
    """300 problems drawn with the seed 2: the whole packs and the narrowed ones give the same entry."""
    packs = installed_form([complete])
    index = narrowed(packs)
    for arch, problem in random.Random(2).sample(list(_domain()), 300):
        device = Device(name="", compute_capability=arch.compute_capability)
        few = dispatch(problem, device, index.get(key_of(problem, arch), ()))

        assert dispatch(problem, device, packs).entry == few.entry


def test_features_that_no_kernel_can_have_are_refused_by_name(complete: Path) -> None:
    """Arguments of a call that no axis stands for: never ignored."""
    packs = installed_form([complete])
    device = Device(name="", compute_capability=ARCH.compute_capability)
    for feature in ("qv", "gather_kv_indices", "score_mod", "mask_mod", "aux_tensors", "block_sparsity"):
        problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, features=frozenset({feature}))
        decision = dispatch(problem, device, packs)

        assert decision.entry is None
        assert f"call without {feature}" in str(decision)


def test_files_without_a_pack_are_an_error(tmp_path: Path) -> None:
    """An empty directory of wheels."""
    with pytest.raises(CoverageError, match="no pack of our own kernels"):
        installed_form([tmp_path])


@pytest.mark.parametrize(("left_out", "code"), [(0, 0), (1, 13)], ids=["closed", "one missing"])
def test_the_command_says_so_by_its_exit_code(complete: Path, tmp_path: Path, capsys, left_out: int, code: int) -> None:
    """And names what is missing; JSON has the same facts."""
    if left_out:
        packed([artifact_of(variant) for variant in WRITTEN[left_out:]], tmp_path)
    path = tmp_path / "fa4_kernels_sm90a" if left_out else complete
    for arguments in (("--against", "api"), ("--against", "api", "--json")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["coverage", str(path), *arguments])
        out = capsys.readouterr().out
        assert ended.value.code == code
        if "--json" in arguments:
            assert json.loads(out)["missing"] == [variant.id for variant in WRITTEN[:left_out]]
        else:
            assert ("NOT complete" in out) == bool(left_out)
            assert all(f"missing: {variant.id}" in out for variant in WRITTEN[:left_out])


def test_a_loose_pack_is_judged_by_its_own_kernels_and_a_selection(tmp_path: Path, capsys) -> None:
    """Complete by itself, unless one of its kernels is launched with another that is not there."""
    dense, split = (parse_variant(f"fwd-sm90a-bf16-hd64-causal{end}") for end in ("", "-paged-split"))

    def code(variants: list[Variant], *arguments: str) -> int:
        packed([artifact_of(variant) for variant in variants], tmp_path / str(len(variants)))
        with pytest.raises(SystemExit) as ended:
            cli.main(["coverage", str(tmp_path / str(len(variants)) / "fa4_kernels_sm90a"), *arguments])
        return ended.value.code

    assert code([dense]) == 0
    assert code([dense], "--against", "api") == CoverageError.exit_code
    assert code([dense], "--select", "fwd-sm90a-bf16-hd64-full") == CoverageError.exit_code
    assert code([dense, split]) == CoverageError.exit_code
    assert "missing: fwd_combine-sm90a-bf16-hd64\n" in capsys.readouterr().out


def test_a_pack_is_judged_against_a_model(tmp_path: Path, capsys) -> None:
    """What its layers call on a GPU, no more."""
    config = tmp_path / "m.json"
    config.write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    arguments = ["--model", str(config), "--gpu", "H200", "--page-size", "16"]
    plan = plan_of_files([str(config)], ["H200"], Use(page_size=16))
    for left_out in (0, 1):
        variants = [item.variant for item in plan.planned][left_out:]
        packed([artifact_of(variant) for variant in variants], tmp_path / str(left_out))
        with pytest.raises(SystemExit) as ended:
            cli.main(["coverage", str(tmp_path / str(left_out) / "fa4_kernels_sm90a"), *arguments])
        assert ended.value.code == (CoverageError.exit_code if left_out else 0)
    assert f"missing: {plan.ids[0]}\n" in capsys.readouterr().out


def test_a_bundle_is_judged_against_what_it_was_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One kernel of the matrix, selected: complete by itself, far from everything; and a listed one that is gone."""
    artifact = artifact_of(WRITTEN[0])
    path = prepare_pack_wheel([artifact], arch=ARCH, toolchain=TOOLCHAIN, out_dir=tmp_path).write().path
    out = write_bundle(tmp_path / "out", [path]).path

    def code(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["coverage", str(out), *arguments])
        return ended.value.code

    assert code() == 0
    assert "not among the kernels that the packs were made for" in capsys.readouterr().out
    assert code("--against", "api") == CoverageError.exit_code
    assert code("--select", WRITTEN[1].id) == CoverageError.exit_code
    assert f"missing: {WRITTEN[1].id}" in capsys.readouterr().out
    description = json.loads((out / "bundle.json").read_text())
    description["packs"][0]["kernels"].append("fwd-gone")
    (out / "bundle.json").write_text(json.dumps(description))
    assert code() == CoverageError.exit_code
    assert "missing: fwd-gone" in capsys.readouterr().out
