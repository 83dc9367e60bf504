"""Contract of the native engine on whole kernels: memory after a run, notes and findings are the Python engine's, and a
fault planted in a kernel is found in every schedule that the Python engine finds it in.
"""

import numpy as np
import pytest

from fa4build.cases.forward import Case
from fa4build.simulate import launch as python_launch
from fa4build.simulate.native import run as native_run
from tests.simulate.mutations.edits import drop, drop_all
from tests.simulate.mutations.kernels import NAMES, kept

CASES = {
    "fwd-sm90a-bf16-hd64-full": Case(name="small", seqlen_q=70, seqlen_k=200),
    "fwd-sm100a-bf16-hd128-full": Case(name="small", seqlen_q=130, seqlen_k=200),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_leaves_the_same_bytes_in_all_memory(name, monkeypatch):
    """Every launch of a proof (three schedules, with checks) is made in both engines on equal memory."""
    kernel, compared = kept(name), []

    def run_both(ptx, launch, memory, **options):
        before = [buffer.data.copy() for buffer in memory.buffers]
        python = python_launch.run_launch(ptx, launch, memory, **options)
        expected = [buffer.data.copy() for buffer in memory.buffers]
        for buffer, data in zip(memory.buffers, before, strict=True):
            buffer.data[:] = data
            if buffer.written is not None:
                buffer.written[:] = 0
        native = native_run.run_launch(ptx, launch, memory, **options)
        for buffer, data in zip(memory.buffers, expected, strict=True):
            assert np.array_equal(buffer.data, data), buffer.name
        assert python.notes == native.notes
        compared.append(options["schedule"])
        return native

    monkeypatch.setattr("fa4build.verify.engines.run_launch", run_both)

    assert kernel.report(kernel.ptx, CASES[name], "python") == ""
    assert compared == ["eager", "late", "random"]


FAULTS = [
    pytest.param("fwd-sm90a-bf16-hd64-full", drop_all(r"fence\.proxy\.async"), r"R4 ", id="sm90a-proxy-fence"),
    pytest.param("fwd-sm90a-bf16-hd64-full", drop(r"wgmma\.fence"), r"R8 ", id="sm90a-wgmma-fence"),
    pytest.param("fwd-sm100a-bf16-hd128-full", drop_all(r"tcgen05\.wait::ld"), r"R7w ", id="sm100a-wait-ld"),
]


@pytest.mark.parametrize(("name", "edit", "rule"), FAULTS)
def test_a_planted_fault_is_found(name, edit, rule):
    """By the rule that the Python engine names."""
    kernel = kept(name)

    assert rule in kernel.report(edit(kernel.ptx), CASES[name], "native")
