"""Contract of operators by recipe, and of kernels with rules over extents.

- Expressions are numbers, names and a few operators; nothing that could run code passes.
- A call allocates what the recipe says, fills it, launches the steps in order with its arguments, returns the results.
- A recipe is chosen by dtypes, extents, axes, rule, family and evidence; a refusal names every reason.
- Among kernels that differ in `when` alone, each call gets the one whose rule holds for its extents.
"""

import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from fa4_kernels import InputError, NoKernelError, PackError, loader, packs  # noqa: E402
from fa4_kernels.expressions import evaluate, names_in  # noqa: E402

from tests.runtime.fake import Nodes, fake_cubin, launch_template, make_plan, param_bytes, write_pack  # noqa: E402

# --- expressions ------------------------------------------------------------------------------------------------------


@given(a=st.integers(0, 10**6), b=st.integers(1, 1000))
def test_rounding_functions(a, b):
    """ceil_div is the least n with n * b >= a, and round_up is that times b."""
    n = evaluate("ceil_div(a, b)", {"a": a, "b": b})

    assert n * b >= a > (n - 1) * b
    assert n * b == evaluate("round_up(a, b)", {"a": a, "b": b})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 ** 30", 1 << 30),
        ("head_dim ** -0.5", 0.125),
        ("seqlen_q * 4 <= 128 and not seqlen_q > 32", True),
        ("1 if seqlen_q == 32 else 2", 1),
        ("min(seqlen_q, 5) + max(-1, 2) - 7 % 4 // 2", 6),
    ],
)
def test_values(text, value):
    """Python's meaning, by hand; seqlen_q = 32, head_dim = 64."""
    assert value == evaluate(text, {"seqlen_q": 32, "head_dim": 64, "unused": 1})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "q.shape",
        "[1]",
        "'a'",
        "(lambda: 1)()",
        "min(*a)",
        "a[0]",
        "2 ** n",
        "9 ** 65",
        "a :=1",
        "f'{a}'",
        "{}",
        "open(1)",
        "print",
        "1 << 99",
        "min(a, key=b)",
        "a" * 2000,
        "(",
    ],
)
def test_nothing_else_is_an_expression(text):
    """Attributes, calls, texts, containers, huge powers: refused before anything is computed."""
    with pytest.raises(PackError):
        evaluate(text, {"a": 1, "n": 1 << 40, "b": 1})


def test_unknown_names_and_impossible_values_are_told():
    """With what is known; division by zero is an error of the pack."""
    with pytest.raises(PackError, match=r"rows is unknown. Known: \['n'\]"):
        evaluate("rows + n", {"n": 1})
    with pytest.raises(PackError, match="has no value"):
        evaluate("1 // n", {"n": 0})
    assert {"a", "b"} == names_in("min(a, b)")


# --- calls ------------------------------------------------------------------------------------------------------------

ID = "scale-sm90a-bf16-hd1-full"


def scale_plan(kernel):
    """x (rows, 8), count (rows), out (rows, 8), factor: a block a row; pointers of all three, rows and factor."""
    n = Nodes()
    rows = n("in", "i64", "x.shape[0]")
    one = n("const", "i32", 1)
    fields = [[8 * i, n("in", "i64", f"{name}.ptr")] for i, name in enumerate(("x", "count", "out"))]
    fields += [[24, n("trunc", "i32", rows)], [28, n("in", "f32", "factor")]]
    grid = [n("trunc", "i32", rows), one, one]
    guard = {"expr": n("sle", "i64", rows, n("const", "i64", 1000)), "message": "x.shape[0] must be at most 1000"}
    args = [{"name": "x", "kind": "tensor", "dtype": "bf16", "rank": 2}]
    args += [{"name": "count", "kind": "tensor", "dtype": "i32", "rank": 1}]
    args += [{"name": "out", "kind": "tensor", "dtype": "bf16", "rank": 2}]
    args += [{"name": "factor", "kind": "scalar", "dtype": "f32"}]
    param = {"kind": "bytes", "size": 32, "align": 8, "fields": fields}
    launches, guards = [launch_template(kernel, grid, [param])], [guard | {"source": "spec"}]
    return make_plan(n, args=args, launches=launches, guards=guards)


def recipe(**changes):
    """Two launches of one kernel: x to a workspace of zeros, then the workspace to the result."""
    kernel = ID
    tensors = [("count", "i32", ["num_blocks"], 0)]
    tensors += [(name, "bf16", ["rows", "8"], None) for name in ("middle", "out")]
    return {
        "id": "twice-8",
        "op": "twice",
        "target": "sm_90a",
        "axes": {"mask": "full", "is_fast": False},
        "when": "rows < 500",
        "inputs": [{"name": "x", "dtype": "bf16", "shape": ["rows", 8]}],
        "scalars": [{"name": "factor", "default": "0.5"}],
        "let": [["num_blocks", "ceil_div(rows, 32)"]],
        "buffers": [dict(zip(("name", "dtype", "shape", "fill"), t, strict=True)) for t in tensors],
        "steps": [
            {"kernel": kernel, "arguments": ["x", "count", "middle", "factor"]},
            {"kernel": kernel, "arguments": ["middle", "count", "out", "factor * 2"]},
        ],
        "results": ["out", "count"],
    } | changes


@pytest.fixture
def use(launcher, fake, tmp_path):
    """A runtime for packs with the given recipes; one pack for each (family, recipes)."""
    symbol = ID.replace("-", "_") + "_0"

    def start(*contents, family=None, evidence=None):
        found = []
        for i, (name, recipes) in enumerate(contents):

            def change(manifest, name=name, recipes=recipes):
                manifest |= {"family": name, "pack": f"pack-{name}", "recipes": list(recipes)}

            options = {"plan": scale_plan(symbol), "cubin": fake_cubin(**{symbol: (32,)}), "change": change}
            found.append(packs.open_pack(name, write_pack(tmp_path / f"{i}", [ID], **options)))
        options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": found, "family": family}
        runtime = loader.Runtime(**options, stream_of=lambda ordinal: 0)
        runtime.evidence = evidence
        loader.use_runtime(runtime)
        return runtime

    yield start
    loader.use_runtime(None)


def x(rows=100, width=8):
    return torch.zeros(rows, width, dtype=torch.bfloat16)


def test_steps_run_in_order_with_buffers_and_scalars(use, fake):
    """Two launches: x to the workspace by 0.5, the workspace to the result by 1; 100 rows are 4 blocks of 32."""
    from fa4_kernels import call

    use(("toy", [recipe()]))
    given = x()
    out, count = call("twice", x=given)
    first, second = (struct.unpack("<3QIf", param_bytes(launch)) for launch in fake.launches)

    assert (out.shape, out.dtype, count.tolist()) == ((100, 8), torch.bfloat16, [0, 0, 0, 0])
    assert (first[0], first[1], first[3], first[4]) == (given.data_ptr(), count.data_ptr(), 100, 0.5)
    assert (second[0], second[2], second[4]) == (first[2], out.data_ptr(), 1.0)
    assert first[2] not in (given.data_ptr(), out.data_ptr())


def test_a_repeated_call_allocates_anew_and_decides_no_more(use, fake, monkeypatch):
    """Results are the caller's; the choice is kept for equal shapes, and made again for others."""
    from fa4_kernels import call, recipes

    use(("toy", [recipe()]))
    first, _ = call("twice", x=x())
    monkeypatch.setattr(recipes, "_considered", None)
    second, _ = call("twice", x=x())

    assert first.data_ptr() != second.data_ptr()
    assert len(fake.launches) == 4
    with pytest.raises(TypeError):
        call("twice", x=x(101))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"factor": 2.0}, None),
        ({"mask": "full", "is_fast": False}, None),
        ({"x": x(width=9)}, r"x.shape\[1\] is 8, not 9"),
        ({"x": x().float()}, "x is bf16"),
        ({"x": x()[0]}, "x has 2 dimensions"),
        ({"x": x(500)}, "needs rows < 500"),
        ({"y": x()}, "takes no tensor y"),
        ({"mask": "causal"}, "mask is full"),
        ({"window": 3}, "knows no window"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(use, fake, arguments, reason):
    """Scalars and axes may be named; anything that differs is told, and nothing is launched."""
    from fa4_kernels import call, explain_call

    use(("toy", [recipe()]))
    arguments = {"x": x()} | arguments
    if reason is None:
        call("twice", **arguments)
        assert "twice: twice-8 from pack-toy" in explain_call("twice", **arguments)
        return
    with pytest.raises(NoKernelError, match=reason):
        call("twice", **arguments)
    assert fake.launches == []


def test_axes_that_are_not_asked_for_must_be_neutral(use):
    """A causal recipe is no answer to a call that names no mask."""
    from fa4_kernels import call

    use(("toy", [recipe(axes={"mask": "causal"})]))
    with pytest.raises(NoKernelError, match="mask is causal"):
        call("twice", x=x())
    call("twice", x=x(), mask="causal")


def test_an_unknown_operator_is_refused_with_the_known_ones(use):
    """And a call without tensors, or with tensors of two devices."""
    from fa4_kernels import call

    use(("toy", [recipe()]))
    with pytest.raises(NoKernelError, match="installed packs describe: twice"):
        call("thrice", x=x())
    with pytest.raises(InputError, match="no tensor was passed"):
        call("twice")
    with pytest.raises(InputError, match="must be on one device"):
        call("twice", x=x(), y=x().to("meta"))


def test_a_guard_of_a_kernel_speaks(use, fake):
    """What the recipe allows and the plan does not."""
    from fa4_kernels import call

    use(("toy", [recipe(when="")]))
    with pytest.raises(InputError, match=r"x.shape\[0\] must be at most 1000"):
        call("twice", x=x(1001))
    assert fake.launches == []


def test_the_family_asked_for_comes_first(use):
    """Without a wish the first id; with one, that family's recipe; a family that is not installed is an error."""
    from fa4_kernels import explain_call

    contents = (("toy", [recipe(id="a")]), ("other", [recipe(id="b")]))
    use(*contents)
    assert "twice: a from pack-toy" in explain_call("twice", x=x())
    use(*contents, family="other")
    assert "twice: b from pack-other" in explain_call("twice", x=x())


def test_evidence_can_be_required(use):
    """The least of a recipe's kernels counts; the pack's has static evidence only."""
    from fa4_kernels import call

    use(("toy", [recipe()]), evidence="static")
    call("twice", x=x())
    use(("toy", [recipe()]), evidence="silicon")
    with pytest.raises(NoKernelError, match="has no silicon evidence"):
        call("twice", x=x())


@pytest.mark.parametrize(
    "change",
    [{"steps": [{"kernel": "other", "arguments": []}]}, {"extra": 1}],
    ids=["missing-kernel", "unknown-part"],
)
def test_a_damaged_recipe_makes_the_pack_unusable(tmp_path, change):
    """Not an error of the first call, and other packs stay usable."""
    from tests.runtime.fake import write_pack

    def write(manifest):
        manifest["recipes"] = [recipe(**change)]

    pack = packs.open_pack("toy", write_pack(tmp_path / "p", [ID], change=write))
    assert isinstance(pack, packs.RefusedPack)
    assert "manifest is damaged" in pack.reason


# --- rules over extents -----------------------------------------------------------------------------------------------

PLAIN = "fwd-sm90a-bf16-hd64-causal"
RULES = {f"{PLAIN}-r1": "num_heads_q == num_heads_kv", f"{PLAIN}-r4": "num_heads_q == 4 * num_heads_kv"}


@pytest.fixture
def attention(launcher, fake, tmp_path):
    """`flash_attn_func` with two kernels of the family `upstream` and, if asked for, one of ours."""
    from fa4_kernels import flash_attn_func

    def start(*, with_ours=False, family=None):
        def change(manifest):
            manifest["family"], manifest["pack"] = "upstream", "pack-upstream"
            for entry in manifest["entries"]:
                entry["axes"] |= {"when": RULES[entry["id"]], "qhead_per_kvhead": int(entry["id"][-1])}

        found = [packs.open_pack("up", write_pack(tmp_path / "up", list(RULES), change=change))]
        if with_ours:
            found.append(packs.open_pack("fa4", write_pack(tmp_path / "fa4", [PLAIN])))
        options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": found, "family": family}
        loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0))
        return flash_attn_func

    yield start
    loader.use_runtime(None)


def heads(count):
    return torch.zeros(1, 33, count, 64, dtype=torch.bfloat16)


def launched(fake):
    return [launch.kernel.decode() for launch in fake.launches]


def test_each_call_gets_the_kernel_of_its_extents(attention, fake):
    """Ratios 1, 4 and 1 again, through one binding; ratio 2 has no kernel and the rules say why."""
    function = attention()
    for q, k in ((2, 2), (8, 2), (1, 1)):
        function(heads(q), heads(k), heads(k), causal=True)

    assert launched(fake) == [f"{name.replace('-', '_')}_0" for name in (f"{PLAIN}-r1", f"{PLAIN}-r4", f"{PLAIN}-r1")]
    with pytest.raises(NoKernelError, match=r"needs num_heads_q == 4 \* num_heads_kv"):
        function(heads(4), heads(2), heads(2), causal=True)


def test_ours_comes_first_unless_the_other_family_is_asked_for(attention, fake):
    """At equal evidence; where the family asked for has no kernel, ours answers; explain says which."""
    from fa4_kernels import explain

    attention(with_ours=True)(heads(2), heads(2), heads(2), causal=True)
    function = attention(with_ours=True, family="upstream")
    function(heads(2), heads(2), heads(2), causal=True)
    function(heads(4), heads(2), heads(2), causal=True)

    own, r1 = PLAIN.replace("-", "_") + "_0", f"{PLAIN}-r1".replace("-", "_") + "_0"
    assert launched(fake) == [own, r1, own]
    assert f"{PLAIN}-r1 from pack-upstream" in str(explain(heads(2), heads(2), heads(2), causal=True))
    assert f"{PLAIN} from fa4-kernels-test" in str(explain(heads(4), heads(2), heads(2), causal=True))


def test_a_family_that_is_not_installed_is_refused_with_the_installed_ones(attention):
    """A misspelt FA4_KERNELS_FAMILY is no silent default."""
    with pytest.raises(InputError, match="FA4_KERNELS_FAMILY is 'upstraem'; installed: upstream"):
        attention(family="upstraem")(heads(2), heads(2), heads(2), causal=True)


@pytest.mark.parametrize(
    "text", ["(((9**64)**64)**64)**64", "((b**64)**64)**64 > 0", "(0 - 8) ** 0.5", "2.0 ** 64 ** 64", "(2**64)**65"]
)
def test_an_expression_ends_soon(text):
    """Powers of powers have a bound in bits, and roots of negative numbers no value; within a second."""
    started = time.perf_counter()
    with pytest.raises(PackError, match=r"has no value|exponent is a number"):
        evaluate(text, {"b": 7})
    assert time.perf_counter() - started < 1
    assert evaluate("2**60 + b**2 + 2**-1", {"b": 7}) == 2**60 + 49.5
