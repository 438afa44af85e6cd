"""What primitives cost: a roofline, or a model that learned on this machine."""

from pathlib import Path

import torch

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import CostModel, Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.learned import Learned, read, unusable
from pyg_accel.rewrite.cost.roofline import Roofline
from pyg_accel.settings import settings

__all__ = ["CostModel", "Device", "GraphFeatures", "Learned", "Primitive", "Roofline", "cost_model"]


def cost_model(device: torch.device | str) -> CostModel:
    """Return what decides on a device; its ``source`` says what that is, and why.

    A model that was learned on such a device decides if the folder of the setting ``cost_models``
    has one. Otherwise a roofline does, as it does without an xgboost that works.

    Raises:
        ValueError: for a folder that is not there, or files in it that hold no cost model.
    """
    if not settings.cost_models:
        return Roofline.of(device)
    own, here = Path(settings.cost_models), Device.of(device)
    if not own.is_dir():
        raise ValueError(f"expected a folder in PYG_ACCEL_COST_MODELS (got '{own}')")
    if not (own / here.slug).is_dir():
        return Roofline.of(device, f"no model of this device in '{own}'")
    if why := unusable():
        return Roofline.of(device, why)
    return read(own / here.slug, here)
