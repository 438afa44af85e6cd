"""The torch.library namespace ``pyg_accel`` that all operators are defined in."""

import torch

__all__ = ["library"]

library = torch.library.Library("pyg_accel", "FRAGMENT")
