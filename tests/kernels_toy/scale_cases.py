"""What the toy family's operator must compute: random rows, and the answer in float64."""

from dataclasses import replace

import numpy as np

from fa4build.cases.bits import from_bits, to_bits
from fa4build.families import Problem, ProofCase
from tests.kernels_toy.scale_family import FAMILY as UNPROVEN


def draw(arguments, seed):
    rng = np.random.default_rng(seed)
    x = to_bits(rng.standard_normal((arguments["rows"], 256)), "bf16")
    scale = rng.uniform(1, 2, arguments["rows"]).astype(np.float32)
    answer = from_bits(x, "bf16") * scale[:, None].astype(np.float64)
    bound = 2**-8 * np.abs(answer).max()  # half a unit in the last place of bf16
    return Problem(inputs={"x": x, "scale": scale.view(np.uint32)}, expected={"out": (answer, float(bound))})


def cases(recipe):
    return (ProofCase(name="rows", draw=f"{__name__}:draw", arguments={"rows": 3}),)


FAMILY = replace(UNPROVEN, cases=cases)
