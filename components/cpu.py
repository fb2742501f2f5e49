"""What the CPU of this machine can do."""

from __future__ import annotations

import torch


def multiplies_bf16() -> bool:
    """Whether oneDNN has matrix products in bfloat16 here.

    Without them (no AVX-512 on x86-64) PyTorch multiplies with plain loops: on two cores with AVX2
    a product of two 2,048 x 2,048 matrices ran at 0.3 GFLOP/s in bfloat16, at 91 in float32.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
