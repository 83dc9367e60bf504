"""Probe kernels: small PTX programs for sm_90a, one hardware mechanism each, run by the simulator and by a GPU alike.

A probe is one CTA with two buffers, `input` and `output`, and tensor maps on either. Every probe states what its output
must be. `benchmarks/record_probes.py` runs them on a GPU and stores what the hardware wrote in `tests/golden/probes/`.
The PTX is written by hand, so that no compiler stands between the question and the instruction.
"""
