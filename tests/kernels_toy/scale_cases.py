"""What the toy family's operator must compute, for the tests of its proof: right answers, and wrong ones."""

import numpy as np

from fa4build.families import Problem, ProofCase
from fa4build.verify_runs import from_bits, to_bits

ROWS = 3


def draw(arguments, seed):
    """Rows of 256, each with a factor; the answer is off by `arguments["off"]` of what it is."""
    rng = np.random.default_rng(seed)
    x = to_bits(rng.standard_normal((ROWS, 256)), "bf16")
    scale = rng.uniform(1, 2, ROWS).astype(np.float32)
    answer = from_bits(x, "bf16") * scale[:, None].astype(np.float64)
    bound = 2**-8 * np.abs(answer).max()  # half a unit in the last place of bf16
    return Problem(
        inputs={"x": x, "scale": scale.view(np.uint32)},
        expected={"out": (answer * (1 + arguments["off"]), float(bound))},
    )


def cases(recipe):
    """One right case."""
    return (ProofCase(name="rows", draw=f"{__name__}:draw", arguments={"off": 0.0}),)


def wrong_cases(recipe):
    """One whose answer is not what the kernel computes."""
    return (ProofCase(name="rows", draw=f"{__name__}:draw", arguments={"off": 0.1}),)
