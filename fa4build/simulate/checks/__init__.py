"""Hazard checks: an optional observer of memory accesses and synchronisation. Off, the simulator does not pay for
them.
"""
