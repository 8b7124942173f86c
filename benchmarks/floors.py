"""What the machine can do."""

import resource
import sys
import time
from statistics import median

import torch


def product_rate(dtype: torch.dtype = torch.float32, size: int = 4096, repeats: int = 9) -> float:
    """Floating-point operations a second of a square matrix product, the median of some repeats."""
    left, right = torch.randn(2, size, size, dtype=dtype)
    product = left @ right
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.matmul(left, right, out=product)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / median(seconds)


def peak_bytes() -> int:
    """The most memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
