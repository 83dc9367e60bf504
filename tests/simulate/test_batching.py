"""Contract of the gathering of calls: every name gets the value that the lines in order would give it, lines with
effects keep their order, and many equal calls become one.
"""

import numpy as np

from fa4build.simulate.translate.batching import batched
from fa4build.simulate.translate.node_scope import NODE_SCOPE
from tests.simulate.ptx_snippets import result, run


def values_of(lines: list[str], **names) -> dict:
    """All names after running the lines; `effects` lists what `effect(g, x)` was called with."""
    effects: list = []

    def effect(g, x):
        effects.append(x.tolist())
        return x

    scope = {**NODE_SCOPE, "effect": effect, "g": None, **names}
    exec("\n".join(lines), scope)
    return {**scope, "effects": effects}


def random_lines(rng: np.random.Generator, count: int) -> list[str]:
    """Single assignments, each of earlier names: calls that are gathered, plain expressions, and effects."""
    lines = [f"t{i} = K[{i}]" for i in range(6)]
    for i in range(6, count):
        a, b, c = (f"t{rng.integers(0, i)}" for _ in range(3))
        kinds = (
            f"fma32({a}, {b}, {c})",
            f"fmax({a}, {b})",
            f"{a} + {b}",
            f"effect(g, {a})",
            f"approximate({a}, 'ex2_ftz')",
        )
        lines.append(f"t{i} = {kinds[rng.integers(0, len(kinds))]}")
    return lines


def test_all_names_keep_their_values():
    """Random programs: the same bits in another order, and effects in theirs."""
    with np.errstate(all="ignore"):
        for seed in range(30):
            rng = np.random.default_rng(seed)
            lines, inputs = random_lines(rng, 120), rng.uniform(-1, 1, (6, 32)).astype(np.float32)
            expected, found = values_of(lines, K=inputs), values_of(batched(lines), K=inputs)
            assert expected["effects"] == found["effects"]
            for i in range(120):
                assert expected[f"t{i}"].tobytes() == found[f"t{i}"].tobytes(), (seed, i)


def test_independent_chains_go_in_step():
    """Eight chains of three fma, one after the other, are three calls."""
    lines = [f"t{i} = K[{i}]" for i in range(8)]
    for chain in range(8):
        for step in range(3):
            number = 10 * (chain + 1) + step
            before = f"t{number - 1}" if step else f"t{chain}"
            lines.append(f"t{number} = fma32({before}, t0, t1)")

    assert 3 == sum("fma32" in line for line in batched(lines))
    assert not [line for line in batched(lines) if line.count("fma32") > 1]


def test_one_lane_of_many_that_float64_would_round_twice():
    """24929 * 673 = 2^24 + 1, so the product is 1 + 2^-24, halfway between two float32: to even, 1. Lane 7 adds 2^-80,
    which float64 loses: the next float32 above 1.
    """
    a, b, c = (int(np.float32(x).view(np.uint32)) for x in (24929 / 2**14, 673 / 2**10, 2.0**-80))
    body = f"mov.b32 %r20, {a}; setp.eq.s32 %p1, %r0, 7; selp.b32 %r22, {c}, 0, %p1;"
    body += "".join(f"mov.b32 %r{40 + i}, {b}; fma.rn.f32 %r{30 + i}, %r20, %r{40 + i}, %r22;" for i in range(6))
    body += "".join(result(i, f"%r{30 + i}") for i in range(6))
    out = run(body, words=6)

    assert {0x3F800001} == set(out[7].tolist())
    assert {0x3F800000} == set(np.delete(out, 7, axis=0).reshape(-1).tolist())
