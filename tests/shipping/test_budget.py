"""Contract of size forecasts and of the split.

A forecast told from the sample is within 15 % of the wheel that is built; told from less, it names what is missing and
gives no number. Packs over the limit are split into as few parts as it allows, no kernel is lost or doubled, the parts
together serve what the whole served, and the runtime's extras name all of them.
"""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from fa4build.errors import WheelError
from fa4build.matrix.arch import arch_named
from fa4build.matrix.variants import Selection
from fa4build.shipping.budget import Traits, forecast, part_labels, sample_of, split
from fa4build.shipping.pack import Artifact, read_pack
from fa4build.shipping.release import write_wheels
from fa4build.shipping.wheel import PackLabels, pack_wheel_size, runtime_extras
from fa4build.shipping.wheel_file import read_wheel
from fa4build.store.cache import Cache
from tests.artifacts import TOOLCHAIN, made_up_artifact, with_code
from tests.shipping.test_release import fill

ARCH = arch_named("sm90")
HEADS = (64, 96, 128, 256)
MASKS = ("full", "causal", "local")
KINDS = (("bf16", False), ("fp16", False), ("bf16", True), ("fp16", True))


def noise(*seed: object, size: int) -> bytes:
    """Incompressible bytes that are a function of the seed."""
    return random.Random(repr(seed)).randbytes(size)


def kernel(head_dim: int, mask: str, dtype: str, softcap: bool, op: str = "fwd") -> Artifact:
    """Machine code as a compiler would make it: parts that follow from head_dim, from the mask, from both, from all.

    A fixed 3,000 bytes, 12 bytes of each unit of head_dim, 700 for the mask, 1,500 for both, 400 to 900 for the rest.
    """
    model = made_up_artifact(head_dim=head_dim, mask=mask, dtype=dtype)
    code = noise(op, size=3000) + noise(op, head_dim, size=12 * head_dim) + noise(op, mask, size=700)
    code += noise(op, head_dim, mask, size=1500)
    code += noise(op, head_dim, mask, dtype, softcap, size=400 + 500 * softcap)
    name = f"{op}-sm90a-{dtype}-hd{head_dim}-{mask}" + ("-softcap" if softcap else "")
    facts = dataclasses.replace(model.facts, id=name, op=op, axes={**model.facts.axes, "softcap": softcap})
    return with_code(facts, code)


def family(op: str = "fwd") -> list[Artifact]:
    """48 kernels in the order of a matrix."""
    kinds = itertools.product(HEADS, MASKS, KINDS)
    return [kernel(head, mask, dtype, softcap, op) for head, mask, (dtype, softcap) in kinds]


def traits(artifacts: list[Artifact]) -> list[Traits]:
    """As forecasts see them."""
    return [Traits(id=a.facts.id, op=a.facts.op, axes=a.facts.axes) for a in artifacts]


def test_the_sample_has_every_cell_and_a_probe_of_each_kind_and_head_dim() -> None:
    """4 head dims x 3 masks, then 3 further kinds x 4 head dims, their masks taking turns: 24 of 48."""
    kernels = traits(family())
    sample = sample_of(kernels)
    probes = [name for name in sample if "fp16" in name and "softcap" not in name]

    assert len(sample) == 24
    assert set(sample) >= {f"fwd-sm90a-bf16-hd{head}-{mask}" for head in HEADS for mask in MASKS}
    assert probes == [
        "fwd-sm90a-fp16-hd64-full",
        "fwd-sm90a-fp16-hd96-causal",
        "fwd-sm90a-fp16-hd128-local",
        "fwd-sm90a-fp16-hd256-full",
    ]


@pytest.mark.parametrize("ops", [("fwd",), ("fwd", "bwd")], ids=["one group", "two groups"])
def test_a_forecast_is_within_15_percent(ops: tuple[str, ...]) -> None:
    """Of the wheel, manifest and metadata included."""
    artifacts = [artifact for op in ops for artifact in family(op)]
    kernels = traits(artifacts)
    sample = {a.facts.id: a for a in artifacts if a.facts.id in sample_of(kernels)}
    told = forecast(kernels, sample, arch=ARCH, toolchain=TOOLCHAIN, name="p")
    built = pack_wheel_size(artifacts, arch=ARCH, toolchain=TOOLCHAIN)

    assert told.num_sampled == len(sample) == len(artifacts) // 2
    assert told.size is not None
    assert abs(told.size - built) < 0.15 * built


def test_without_the_whole_sample_there_is_no_number() -> None:
    """It names what to compile."""
    kernels = traits(family())
    told = forecast(kernels, {}, arch=ARCH, toolchain=TOOLCHAIN, name="p")

    assert (told.size, told.num_sampled, told.missing) == (None, 0, sample_of(kernels))


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (96, [""]),
        (48, ["bwd", "fwd"]),
        (47, [f"{op}-hd{head}" for op in ("bwd", "fwd") for head in ("128", "256", "64", "96")]),
    ],
)
def test_the_split_is_as_coarse_as_the_limit_allows(limit: int, parts: list[str]) -> None:
    """A kernel counts one byte here: 96 together, 48 a direction, 12 a head_dim. Nothing is lost or doubled."""
    kernels = traits([*family("fwd"), *family("bwd")])
    found = split(kernels, lambda part, members: len(members), limit)

    assert list(found) == parts
    assert sorted(k.id for members in found.values() for k in members) == sorted(k.id for k in kernels)


def test_what_cannot_be_split_is_refused() -> None:
    """12 kernels of one direction and head_dim, limit 11; a single direction is not named."""
    kernels = traits(family())

    assert list(split(kernels, lambda part, members: len(members), 12)) == ["hd128", "hd256", "hd64", "hd96"]
    with pytest.raises(WheelError, match=r"hd128: 12 bytes with 12 kernels, the limit is 11.*Select fewer variants"):
        split(kernels, lambda part, members: len(members), 11)


def test_recipes_stay_with_their_kernels() -> None:
    """Those of a part are kept; one whose kernels would be in two parts is an error."""
    recipes = ({"id": "a", "steps": [{"kernel": "x"}, {"kernel": "y"}]}, {"id": "b", "steps": [{"kernel": "z"}]})
    labels = PackLabels(name="fa4-kernels-sm90a", recipes=recipes)

    assert [recipe["id"] for recipe in part_labels(labels, "bwd", ["x", "y"]).recipes] == ["a"]
    assert part_labels(labels, "bwd", ["x", "y"]).name == "fa4-kernels-sm90a-bwd"
    assert part_labels(labels, "", ["x"]) == labels
    with pytest.raises(WheelError, match="fa4-kernels-sm90a-fwd: a needs kernels of another part"):
        part_labels(labels, "fwd", ["x", "z"])


def test_wheels_over_the_limit_are_written_as_parts(tmp_path: Path) -> None:
    """Two head dims whose pack is one byte over: two wheels, each within, and together the same kernels."""
    pytest.importorskip("cutlass", reason="keys name the installed compiler")
    selection = Selection(globs=tuple(f"fwd-sm90a-bf16-hd{head}-{mask}" for head in (64, 128) for mask in MASKS))
    cache = Cache(tmp_path / "cache")
    fill(cache, selection)
    options = {"platforms": (), "evidence_dirs": ()}
    (whole,) = write_wheels(selection, cache, out_dir=tmp_path / "whole", **options)
    limit = whole.size - 1
    parts = write_wheels(selection, cache, out_dir=tmp_path / "parts", limit_bytes=limit, **options)
    ids = [entry.id for wheel in parts for entry in read_pack(wheel.path).manifest.entries]

    assert [wheel.path.name for wheel in parts] == [
        f"fa4_kernels_sm90a_{part}-0.1.0-py3-none-any.whl" for part in ("hd128", "hd64")
    ]
    assert all(wheel.size <= limit for wheel in parts)
    assert sorted(ids) == sorted(entry.id for entry in read_pack(whole.path).manifest.entries)
    assert (
        "fa4-kernels-sm90a-hd64"
        in read_wheel(parts[1].path).files["fa4_kernels_sm90a_hd64-0.1.0.dist-info/METADATA"].decode()
    )


def test_extras_name_every_part() -> None:
    """`fa4-kernels[sm90]` stays what users write, whatever the split."""
    extras = runtime_extras({"sm90a": ("fa4-kernels-sm90a-fwd", "fa4-kernels-sm90a-bwd")})

    assert extras["sm90"] == ("fa4-kernels-sm90a-bwd", "fa4-kernels-sm90a-fwd")
    assert extras["sm100"] == ("fa4-kernels-sm100a",)
    assert set(extras["all"]) == {*extras["sm90"], "fa4-kernels-sm100a", "fa4-kernels-sm103a"}
