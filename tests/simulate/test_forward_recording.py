"""Contract: our sm_90a forward kernels give in the simulator the bits that they give on an H200.

tests/golden/h200_forward.npz holds PTX, launch plans and the hardware's outputs (tests/recordings/record_forward.py);
the kernels are launched in the simulator through the same plans. Nothing is free: the forward pass has no unordered
sums.
"""

import numpy as np
import pytest

from fa4build.plan import plan_from_json
from fa4build.simulate import simulate
from tests.simulate.forward_cases import CASES, RECORDING, VARIANTS, arrays_of, draw, scalars_of, unpacked_text


def test_inputs_are_the_same_on_every_machine():
    """The first numbers of seed 1 as bf16: sums of four bytes of the raw generator words, minus 510, over 128."""
    first = np.random.PCG64(1).random_raw(1).tobytes()
    expected = [(sum(first[4 * i : 4 * i + 4]) - 510) / 128 for i in range(2)]
    words = draw(1, (2,), 1.0, "bf16").astype(np.uint32) << np.uint32(16)

    assert np.allclose(expected, words.view(np.float32), rtol=2**-8, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_simulator_gives_the_bits_of_the_hardware(variant, case):
    """out and lse, every bit."""
    if not RECORDING.exists():
        pytest.skip("no recording; run tests/recordings/record_forward.py on an H200")
    _, _, dtype, head_dim, mask = variant.split("-")
    head_dim = int(head_dim.removeprefix("hd"))
    with np.load(RECORDING) as data:
        ptx, plan = unpacked_text(data[f"{variant}.ptx"]), plan_from_json(unpacked_text(data[f"{variant}.plan"]))
        out, lse = data[f"{variant}.{case.name}.out"], data[f"{variant}.{case.name}.lse"]
        num_sms = int(data["num_sms"])
    arrays = arrays_of(case, head_dim, dtype)
    simulate(plan, ptx, arrays, scalars_of(case, head_dim, mask, num_sms))

    assert 0 == np.count_nonzero(arrays["out"] != out)
    assert 0 == np.count_nonzero(arrays["lse"].view(np.uint32) != lse)
