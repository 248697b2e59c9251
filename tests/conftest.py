"""Set-up for all tests: without a GPU, Triton kernels run in Triton's interpreter (read when Triton is imported)."""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
