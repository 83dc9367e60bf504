"""Probe kernels: small PTX programs for sm_90a, one hardware mechanism each, run by the simulator and by a GPU alike.

A probe is one CTA (or one cluster) with two buffers, `input` and `output`, and tensor maps on either. Every probe says
what its output must be. `tests/recordings/record_probes.py` runs them on a GPU; what an H200 wrote is in
`tests/golden/h200_probes.npz`. The PTX is written by hand, so that no compiler stands between the question and the
instruction.
"""
