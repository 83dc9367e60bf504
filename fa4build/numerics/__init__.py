"""Host oracles of the kernels' building blocks, and the figures the design rests on, computed from them.

The oracles give what the device code gives, bit for bit where that is defined, from numpy alone: no compiler, no
GPU. The constants they use are read from the kernels' own files (`kernel_blocks`), so there is no second copy to
drift. Not for speed.
"""
