"""The CUDA backend: sparse products on Tensor Cores, after TC-GNN."""

from typing import Any

import torch

from pyg_accel.backends.base import Backend
from pyg_accel.backends.spec import OpSpec
from pyg_accel.native import build_info, cuda_unavailable_reasons

__all__ = ["CudaBackend"]


class CudaBackend(Backend):
    """Tensor-Core kernels in CUDA C++ for compute capability 8.0 and later."""

    name = "cuda"

    def unavailable_reasons(self) -> list[str]:
        """It needs a GPU with tf32 Tensor Cores and the native library."""
        reasons = cuda_unavailable_reasons()
        if not reasons and torch.cuda.get_device_capability() < (8, 0):
            return [f"{torch.cuda.get_device_name()} has no tf32 Tensor Cores"]
        return reasons

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """It runs sums of weighted source features on a GPU."""
        return [] if spec.device == "cuda" else [f"tensors are on '{spec.device}'"]

    def cost(self, spec: OpSpec) -> float:
        """Return the expected time."""
        return 1.0

    def info(self) -> dict[str, Any]:
        """Return the facts of the build."""
        return {k: v for k, v in build_info().items() if k.startswith("cuda")}
