"""Ends well if `python -m fa4_kernels doctor` on this machine without a GPU finds a launcher, and no driver."""

import subprocess
import sys

done = subprocess.run([sys.executable, "-W", "error", "-m", "fa4_kernels", "doctor"], capture_output=True, text=True)
print(done.stdout + done.stderr)
sys.exit(0 if done.returncode == 1 and "cannot open the CUDA driver libcuda.so.1" in done.stdout else 1)
