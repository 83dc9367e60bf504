"""Contract of matrix specifications.

A specification is TOML that follows the published schema. Whatever is wrong with it is one error that names the file
and the key. What it selects is written, or an error; a listed value that selects nothing is an error too.
"""

from itertools import chain

import pytest

from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix.arch import ARCHES
from fa4build.matrix.axes import AXES, OPTIONAL_AXES, spell_head_dims
from fa4build.matrix.spec import parse_spec, read_spec, schema
from fa4build.matrix.variants import Selection, expand_matrix

HOPPER_FORWARD = """
edition = 1

[[matrix]]
op = ["fwd"]
arch = ["sm90"]
dtype = ["bf16"]
head_dim = [64, 128]
mask = ["full", "causal"]
"""


def ids(text: str, **selection: object) -> list[str]:
    """Ids that a specification selects."""
    spec = parse_spec(text, path="m.toml")
    return [variant.id for variant in expand_matrix(Selection(specs=(spec,), **selection))]


def test_a_block_is_the_product_of_its_values():
    """Switches that are left out stand for their default: dense, not split, ..."""
    assert [
        "fwd-sm90a-bf16-hd64-full",
        "fwd-sm90a-bf16-hd64-causal",
        "fwd-sm90a-bf16-hd128-full",
        "fwd-sm90a-bf16-hd128-causal",
    ] == ids(HOPPER_FORWARD)


def test_dtype_and_mask_left_out_stand_for_every_valid_value():
    """fp8 is no valid value on sm90a and is not asked for by leaving dtype out."""
    text = 'edition = 1\n[[matrix]]\nop = ["fwd"]\narch = ["sm90a"]\nhead_dim = [256]'

    assert 2 * 3 == len(ids(text))  # dtypes * masks


def test_blocks_and_globs_add_up_and_exclude_takes_away():
    """A union without doubles, minus the excluded ids, in the order of the axes."""
    text = (
        "edition = 1\n"
        'select = ["fwd-sm90a-bf16-hd256-full", "fwd-sm90a-bf16-hd64-*l"]\n'
        'exclude = ["*-hd128-*", "*-local"]\n' + HOPPER_FORWARD.replace("edition = 1", "")
    )

    assert [
        "fwd-sm90a-bf16-hd64-full",
        "fwd-sm90a-bf16-hd64-causal",
        "fwd-sm90a-bf16-hd256-full",
    ] == ids(text)


def test_globs_and_arches_of_the_command_line_narrow_a_specification():
    """Everything given must hold at once."""
    assert ["fwd-sm90a-bf16-hd64-causal"] == ids(HOPPER_FORWARD, globs=("*-hd64-causal",), arches=("sm90",))


def test_the_path_of_a_file_does_as_well(tmp_path):
    """A selection takes a read specification or where it lies."""
    path = tmp_path / "m.toml"
    path.write_text(HOPPER_FORWARD, encoding="utf-8")

    assert expand_matrix(Selection(specs=(read_spec(path),))) == expand_matrix(Selection(specs=(path,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("edition = ", "m.toml: is not valid TOML: "),
        ("", "m.toml: the key 'edition' is missing"),
        ("edition = 2", "m.toml: edition 2 is newer than this fa4build reads (1). Update fa4build."),
        ("edition = 0", "m.toml: edition: 1 was expected"),
        ("edition = true", "m.toml: edition: True is not of type 'integer'"),
        ("edition = 1", "m.toml: selects nothing. Add `select` or a [[matrix]] block."),
        (
            "edition = 1\nselekt = ['*']",
            "unknown: selekt; allowed: edition, select, exclude, matrix. Did you mean select?",
        ),
        ("edition = 1\nselect = '*'", "m.toml: select: '*' must be a list: ['*']"),
        ("edition = 1\n[matrix]\nop = ['fwd']", "m.toml: matrix: is one table; write [[matrix]] instead of [matrix]"),
        ("edition = 1\nmatrix = []", "m.toml: matrix: [] should be non-empty"),
        ("edition = 1\n[[matrix]]\nmask = ['full']", "m.toml: matrix[0]: the key 'op' is missing"),
        (
            "edition = 1\n[[matrix]]\nop = ['fwd']\n[[matrix]]\nop = ['fwd']\ndtype = ['bf16', 'bf8']",
            "m.toml: matrix[1].dtype[1]: 'bf8' is not one of ['bf16', 'fp16', 'e4m3', 'e5m2']",
        ),
        ("edition = 1\n[[matrix]]\nop = ['fwd']\nhead_dim = [80]", "m.toml: matrix[0].head_dim[0]: 80 is not one of"),
        ("edition = 1\n[[matrix]]\nop = ['fwd']\nsplit = [1]", "m.toml: matrix[0].split[0]: 1 is not of type 'bool"),
        ("edition = 1\n[[matrix]]\nop = ['fwd', 'fwd']", "has non-unique elements"),
        ("edition = 1\n[[matrix]]\nop = ['fwd']\nhdim = [64]", "unknown: hdim; allowed: op, arch, dtype, "),
    ],
)
def test_a_wrong_specification_is_an_error_that_names_file_and_key(text, message):
    """Nothing is guessed and nothing ignored."""
    with pytest.raises(VariantError) as caught:
        parse_spec(text, path="m.toml")

    assert message in str(caught.value)
    assert str(caught.value).startswith("m.toml: ")


def test_all_mistakes_are_reported_at_once():
    """Two wrong keys, two messages in one error."""
    with pytest.raises(VariantError, match=r"matrix\[0\]\.dtype\[0\].*matrix\[0\]\.mask\[0\]"):
        parse_spec("edition = 1\n[[matrix]]\nop = ['fwd']\ndtype = ['x']\nmask = ['y']", path="m.toml")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not UTF-8"])
def test_an_unreadable_file_is_a_variant_error(tmp_path, content):
    """The path and the cause, in the one error tree."""
    path = tmp_path / "m.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(VariantError, match=r"m\.toml: cannot be read as a specification"):
        read_spec(path)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("dtype = ['e4m3', 'bf16']", "matrix[0]: no selected variant has dtype 'e4m3'"),
        ("dtype = ['e4m3']", "matrix[0]: no combination of the listed values is valid"),
        (
            "dtype = ['bf16']\nhead_dim = [64]\nlayout = ['varlen']\nsoftcap = [true]\nsink = [true]",
            "have no kernel yet: fwd-sm90a-bf16-hd64-full-varlen-softcap-sink",
        ),
    ],
)
def test_a_block_that_asks_for_what_cannot_be_built_is_an_error(block, message):
    """Refused values and unwritten kernels are named, never dropped."""
    with pytest.raises(NothingSelectedError) as caught:
        ids(f"edition = 1\n[[matrix]]\nop = ['fwd']\narch = ['sm90']\n{block}")

    assert message in str(caught.value)


def test_excluding_everything_is_an_error():
    """An empty matrix is never the answer."""
    with pytest.raises(NothingSelectedError, match="`exclude` removes everything"):
        ids("edition = 1\nselect = ['fwd-sm90a-bf16-hd64-full']\nexclude = ['*']")


def test_the_schema_lists_exactly_the_axes_and_their_values():
    """It is made from them, so that a value added to an axis can be asked for at once."""
    properties = schema()["properties"]["matrix"]["items"]["properties"]
    listed = {axis: rule["items"]["enum"] for axis, rule in properties.items() if "enum" in rule["items"]}
    dims = [value if isinstance(value, int) else tuple(map(int, value.split("x"))) for value in listed.pop("head_dim")]
    names = chain.from_iterable((arch.name, *arch.aliases) for arch in ARCHES)

    assert set(names) == set(listed.pop("arch"))
    assert set(map(spell_head_dims, AXES["head_dims"])) == {
        spell_head_dims(value if isinstance(value, tuple) else (value, value)) for value in dims
    }
    assert {axis: list(AXES[axis]) for axis in listed} == listed
    assert {"op", "arch", "dtype", "head_dim", *OPTIONAL_AXES} == set(properties)
