"""Contract: dispatch is a pure function. It picks an entry that computes exactly the problem on exactly the device, or
none; every entry looked at is in the trace with its reasons; the error says what to do next.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from fa4_kernels.dispatch import HEAD_DIMS, Device, Problem, chosen, dispatch, variant_id
from fa4_kernels.errors import NoKernelError
from fa4_kernels.evidence import record_digest
from fa4_kernels.packs import Blob, Entry, Manifest, Pack, RefusedPack

from tests.runtime.fake import entry_axes
from tests.summaries import summary

H200 = Device(name="NVIDIA H200", compute_capability=(9, 0))
B200 = Device(name="NVIDIA B200", compute_capability=(10, 0))
A100 = Device(name="NVIDIA A100", compute_capability=(8, 0))
BLOB = Blob(group=0, offset=0, size=1, sha256="")
NONE = {"static": None, "simulated": None, "silicon": None}
CAUSAL_128 = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")


def entry(variant_id, *, target="sm_90a", evidence=("static",), **changed_axes):
    op, axes = entry_axes(variant_id)
    axes |= changed_axes
    bare = Entry(id=variant_id, op=op, target=target, axes=axes, cubin=BLOB, plan=BLOB, symbols=(), evidence=NONE)
    return proven(bare, *evidence)


def proven(entry, *levels, **changes):
    """The entry with evidence of these levels alone, sealed for it; `changes` are made before."""
    found = {}
    for level in levels:
        row = summary(level, entry.target, **changes)
        found[level] = {**row, "record": record_digest(level, entry.id, BLOB.sha256, BLOB.sha256, row)}
    return replace(entry, evidence=NONE | found)


def pack(*entries, name="fa4-kernels-sm90a"):
    manifest = Manifest(pack=name, version="0.1.0", targets=("sm_90a",), groups=(), entries=entries)
    return Pack(manifest=manifest, directory=Path())


SM90 = pack(
    entry("fwd-sm90a-bf16-hd128-causal"),
    entry("fwd-sm90a-bf16-hd128-full"),
    entry("fwd-sm90a-bf16-hd192x128-causal"),
    entry("fwd-sm90a-fp16-hd128-causal"),
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "fwd-sm90a-bf16-hd128-causal", id="as asked"),
        pytest.param({"dtype": "fp16"}, "fwd-sm90a-fp16-hd128-causal", id="dtype"),
        pytest.param({"head_dim": 192}, "fwd-sm90a-bf16-hd192x128-causal", id="head_dim and head_dim_v"),
        pytest.param({"mask": "full"}, "fwd-sm90a-bf16-hd128-full", id="mask"),
        pytest.param({"deterministic": True}, "fwd-sm90a-bf16-hd128-causal", id="a forward always is deterministic"),
        pytest.param({"dtype": "e4m3"}, None, id="no such dtype"),
        pytest.param({"head_dim": 64, "head_dim_v": 64}, None, id="no such head_dim"),
        pytest.param({"mask": "local"}, None, id="causal never stands in for local"),
        pytest.param({"layout": "varlen"}, None, id="no such layout"),
        pytest.param({"op": "bwd"}, None, id="no such op"),
        pytest.param({"features": frozenset({"softcap"})}, None, id="no softcap"),
    ],
)
def test_only_an_exact_match_is_chosen(changes, expected):
    """One axis a row: the entry that differs in nothing, or none."""
    decision = dispatch(replace(CAUSAL_128, **changes), H200, [SM90])

    assert (decision.entry.id if decision.entry else None) == expected


@pytest.mark.parametrize("device", [B200, A100, Device(name="next", compute_capability=(9, 1))])
def test_a_cubin_runs_on_its_own_capability_only(device):
    """`a` targets promise no other device, older, newer or of another family."""
    decision = dispatch(CAUSAL_128, device, [SM90])

    assert decision.entry is None
    assert all("runs on compute capability 9.0 only" in item.reasons for item in decision.trace)


def test_every_entry_appears_in_the_trace_with_all_its_reasons():
    """Two entries fail on one axis, one on two; the exact words."""
    decision = dispatch(CAUSAL_128, H200, [SM90])
    reasons = {item.entry.id: item.reasons for item in decision.trace}

    assert reasons == {
        "fwd-sm90a-bf16-hd128-causal": (),
        "fwd-sm90a-bf16-hd128-full": ("mask is full",),
        "fwd-sm90a-bf16-hd192x128-causal": ("head_dim is 192",),
        "fwd-sm90a-fp16-hd128-causal": ("dtype is fp16",),
    }


def test_a_feature_that_was_not_asked_for_is_a_refusal():
    """A cubin with softcap computes something else; one with an axis never heard of is not even called right."""
    softcap = entry("fwd-sm90a-bf16-hd128-causal-softcap", softcap=True)
    unheard = entry("fwd-sm90a-bf16-hd128-causal-alibi", alibi=2)
    trace = dispatch(CAUSAL_128, H200, [pack(softcap, unheard)]).trace
    call = "is called in a way this fa4-kernels does not know; upgrade fa4-kernels"

    assert [item.reasons for item in trace] == [("was built with softcap",), ("was built with alibi = 2", call)]


def test_a_feature_this_version_cannot_pass_is_a_refusal():
    """An entry with alibi, asked for with alibi: no argument list has a place for it, so it is not called."""
    alibi = entry("fwd-sm90a-bf16-hd128-causal-alibi", alibi=True)
    problem = replace(CAUSAL_128, features=frozenset({"alibi"}))
    (considered,) = dispatch(problem, H200, [pack(alibi)]).trace

    assert considered.reasons == ("is called in a way this fa4-kernels does not know; upgrade fa4-kernels",)


def test_how_a_kernel_works_does_not_matter():
    """cta_group is no part of a problem."""
    two_cta = entry("fwd-sm100a-bf16-hd128-full-2cta", target="sm_100a", cta_group=2)
    decision = dispatch(replace(CAUSAL_128, mask="full"), B200, [pack(two_cta)])

    assert decision.entry is two_cta


def test_a_kernel_for_some_extents_comes_before_one_for_all():
    """Its id sorts behind. Beyond its rule, or with more evidence, the other one is taken."""
    plain = entry("fwd-sm100a-bf16-hd128-full", target="sm_100a")
    pairs = entry("fwd-sm100a-bf16-hd128-full-2cta", target="sm_100a", cta_group=2, when="seqlen_q > 256")
    better = proven(plain, "static", "simulated")
    full = replace(CAUSAL_128, mask="full")

    assert dispatch(full, B200, [pack(plain, pairs)]).entry is pairs
    for seqlen_q, taken in ((256, plain), (257, pairs)):
        assert dispatch(replace(full, extents={"seqlen_q": seqlen_q}), B200, [pack(plain, pairs)]).entry is taken
    assert dispatch(full, B200, [pack(better, pairs)]).entry is better


def test_more_evidence_wins_then_the_first_id():
    """Silicon before simulated before static; equal evidence: alphabetical."""
    on_silicon = entry("fwd-sm90a-bf16-hd128-causal", evidence=("static", "silicon"))
    other = proven(replace(on_silicon, id="fwd-sm90a-bf16-hd128-causal-2cta"), "static")
    first = proven(replace(on_silicon, id="fwd-sm90a-bf16-hd128-a"), "static")

    assert dispatch(CAUSAL_128, H200, [pack(first, other, on_silicon)]).entry is on_silicon
    assert dispatch(CAUSAL_128, H200, [pack(other, first)]).entry is first


def test_an_order_of_sums_that_nobody_asked_for_is_not_paid_for():
    """A deterministic kernel computes what the plain one does, more slowly: it stands in only where that one is not,
    or has less evidence. Ids sort the other way round here."""
    plain, ordered = (entry(f"bwd-sm90a-bf16-hd128-causal-{rest}softcap") for rest in ("", "deterministic-"))
    plain, ordered = (replace(one, axes=one.axes | {"softcap": True}) for one in (plain, ordered))
    better = proven(ordered, "static", "simulated")
    capped = replace(CAUSAL_128, op="bwd", features=frozenset({"softcap"}))

    assert dispatch(capped, H200, [pack(ordered, plain)]).entry == plain
    assert dispatch(replace(capped, deterministic=True), H200, [pack(ordered, plain)]).entry == ordered
    assert dispatch(capped, H200, [pack(ordered)]).entry == ordered
    assert dispatch(capped, H200, [pack(better, plain)]).entry == better


def test_evidence_can_be_required():
    """An entry that has not passed the level is refused with that reason; without the wish none is needed."""
    (considered,) = dispatch(CAUSAL_128, H200, [pack(SM90.manifest.entries[0])], evidence="silicon").trace

    assert considered.reasons == ("has no silicon evidence",)
    assert dispatch(CAUSAL_128, H200, [pack(replace(SM90.manifest.entries[0], evidence={}))]).entry is not None


CLAIMS = {
    "a word": {"silicon": True},
    "some field": {"silicon": {"device": "NVIDIA H200"}},
    "no record": {"silicon": summary("silicon")},
    "record of another kernel": {"silicon": proven(entry("fwd-sm90a-bf16-hd128-full"), "silicon").evidence["silicon"]},
    "another GPU": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon", capability="sm_100a").evidence,
    "failed": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon", worst_ratio=1.5).evidence,
    "NaN": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon", worst_ratio=float("nan")).evidence,
    "no case": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon", cases=0).evidence,
    "a new field": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon", by="me").evidence,
    "changed later": {
        "silicon": proven(entry("fwd-sm90a-bf16-hd128-causal"), "silicon").evidence["silicon"] | {"cases": 99}
    },
}


@pytest.mark.parametrize("evidence", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_that_nothing_backs_ranks_as_none(evidence):
    """It is shown as claimed, comes behind static evidence, and is refused where silicon is required."""
    claimed = replace(entry("fwd-sm90a-bf16-hd128-causal"), evidence=NONE | evidence)
    static = entry("fwd-sm90a-bf16-hd128-causal-2cta")
    chosen_one = dispatch(CAUSAL_128, H200, [pack(claimed)])

    assert "(evidence: none; claimed: silicon)" in str(chosen_one)
    assert dispatch(CAUSAL_128, H200, [pack(claimed, static)]).entry is static
    (considered,) = dispatch(CAUSAL_128, H200, [pack(claimed)], evidence="static").trace
    assert considered.reasons == ("has no static evidence (silicon is claimed, and nothing backs it)",)
    assert dispatch(CAUSAL_128, H200, [pack(claimed)], evidence="silicon", claims=True).entry is claimed


def text_of_refusal(problem, device, packs):
    with pytest.raises(NoKernelError) as caught:
        chosen(dispatch(problem, device, packs))
    return str(caught.value)


def test_the_error_says_what_was_considered_and_what_to_build():
    """The whole text for one refusal: nearest first, then the next step."""
    text = text_of_refusal(replace(CAUSAL_128, head_dim=96, head_dim_v=96), H200, [SM90])

    assert text == (
        "no kernel for fwd, dense, bf16, head_dim 96, mask causal on NVIDIA H200 "
        "(compute capability 9.0, target sm_90a).\n"
        "Considered: 4 kernels:\n"
        "  fwd-sm90a-bf16-hd128-causal (fa4-kernels-sm90a): head_dim is 128; head_dim_v is 128\n"
        "  fwd-sm90a-bf16-hd192x128-causal (fa4-kernels-sm90a): head_dim is 192; head_dim_v is 128\n"
        "  fwd-sm90a-bf16-hd128-full (fa4-kernels-sm90a): head_dim is 128; head_dim_v is 128; mask is full\n"
        "  fwd-sm90a-fp16-hd128-causal (fa4-kernels-sm90a): dtype is fp16; head_dim is 128; head_dim_v is 128\n"
        "What to do: build it and install the new pack (add a --select or --arch for the kernels that the old pack "
        "has): fa4build wheel --select 'fwd-sm90a-bf16-hd96-causal'."
    )


def test_a_head_dim_that_cannot_be_built_is_to_be_padded():
    """No command that would fail: to which head dim, and what else changes with it."""
    text = text_of_refusal(replace(CAUSAL_128, head_dim=80, head_dim_v=80), H200, [SM90])

    assert text.endswith(
        "What to do: no kernel has this head_dim; there are 64, 96, 128, (192, 128), 256. Pad q, k and v with zeros to "
        "head_dim 96, pass softmax_scale, and cut the output."
    )


def test_a_head_dim_over_the_largest_has_no_kernel_at_all():
    """Nothing to pad to."""
    text = text_of_refusal(replace(CAUSAL_128, head_dim=512, head_dim_v=512), H200, [SM90])

    assert text.endswith("Use another attention implementation for this call.")


def test_the_head_dims_that_errors_name_are_those_of_the_builder():
    """The runtime is shipped alone, so it has its own list."""
    from fa4build.matrix.axes import OPS

    assert set(HEAD_DIMS) == set(OPS["fwd"].head_dims)


@pytest.mark.parametrize(
    ("problem", "device", "packs", "step"),
    [
        pytest.param(CAUSAL_128, B200, [SM90], "pip install 'fa4-kernels[sm100]'", id="no pack for this GPU"),
        pytest.param(CAUSAL_128, H200, [], "pip install 'fa4-kernels[sm90]'", id="no pack at all"),
        pytest.param(
            CAUSAL_128, A100, [SM90], "use a GPU of compute capability 9.0, 10.0, 10.3", id="GPU without target"
        ),
        pytest.param(
            replace(CAUSAL_128, features=frozenset({"score_mod"})), H200, [SM90], "call without score_mod", id="feature"
        ),
    ],
)
def test_the_next_step_fits_the_cause(problem, device, packs, step):
    """Install a pack, use another GPU, or leave out a feature."""
    assert step in text_of_refusal(problem, device, packs)


def test_refused_packs_are_told():
    """A damaged or newer pack is part of the answer."""
    broken = RefusedPack(name="fa4-kernels-sm90a", reason="its manifest has schema 2")
    text = text_of_refusal(CAUSAL_128, H200, [broken])

    assert "pack fa4-kernels-sm90a is not used: its manifest has schema 2" in text


def test_a_long_trace_is_cut():
    """Twelve entries are shown, the nearest; the rest is a number."""
    entries = [entry(f"fwd-sm90a-fp16-hd{dim}-full") for dim in range(8, 168, 8)]
    text = text_of_refusal(CAUSAL_128, H200, [pack(*entries)])

    assert "and 8 more" in text
    assert len(text.splitlines()) == 16


def test_the_id_to_build_is_one_that_the_builder_parses():
    """What the error tells people to select is an id of fa4build, and means the problem."""
    from fa4build.matrix.variants import parse_variant

    problems = [replace(CAUSAL_128, head_dim=192), replace(CAUSAL_128, layout="varlen", mask="local")]
    problems += [replace(CAUSAL_128, features=frozenset({"softcap", "sink"}))]
    problems += [replace(CAUSAL_128, layout="paged", features=frozenset({"softcap", "split"}))]
    for problem in problems:
        variant = parse_variant(variant_id(problem, "sm_90a"))

        assert (variant.op, variant.dtype, variant.layout, variant.mask) == (
            "fwd",
            "bf16",
            problem.layout,
            problem.mask,
        )
        assert (variant.head_dim, variant.head_dim_v) == (problem.head_dim, problem.head_dim_v)
        assert {name for name in ("softcap", "sink", "split") if getattr(variant, name)} == problem.features


def test_of_one_kernel_in_two_packs_the_newest_is_taken():
    """Whatever the packs' names and evidence; the trace says why the older is not. One that fits alone is taken."""
    id_, other = "fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd64-full"
    old = pack(entry(id_, evidence=("static", "silicon")), entry(other), name="fa4-kernels-sm90a")
    old = replace(old, manifest=replace(old.manifest, version="0.9.0"))
    new = pack(entry(id_), name="fa4-kernels-sm90a-dense")
    new = replace(new, manifest=replace(new.manifest, version="0.10.0"))
    problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
    for order in ((old, new), (new, old)):
        decision = dispatch(problem, H200, order)
        assert decision.pack is new
        assert "is of version 0.9.0, and fa4-kernels-sm90a-dense 0.10.0 has it too" in str(decision)
        assert dispatch(problem, H200, order, evidence="silicon").pack is old
        assert dispatch(Problem(dtype="bf16", head_dim=64, head_dim_v=64), H200, order).pack is old
