"""What primitives cost: learned models, and a roofline where there are none."""

import torch

from pyg_accel.rewrite.cost.base import CostModel, Primitive
from pyg_accel.rewrite.cost.device import Device
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.roofline import Roofline

__all__ = ["CostModel", "Device", "GraphFeatures", "Primitive", "Roofline", "cost_model"]


def cost_model(device: torch.device | str) -> CostModel:
    """Return what decides on a device; its ``source`` says why it is that."""
    return Roofline.of(device, "no learned model is there yet")
