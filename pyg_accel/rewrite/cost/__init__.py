"""Cost models of primitives: a roofline, or a model that was trained on this machine."""

from pathlib import Path

import torch

from pyg_accel.rewrite.cost.base import CostModel, Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.learned import Learned, read, unusable
from pyg_accel.rewrite.cost.roofline import Roofline
from pyg_accel.runtime.machine import Device
from pyg_accel.settings import settings

__all__ = ["CostModel", "Device", "GraphFeatures", "Learned", "Primitive", "Roofline", "cost_model"]


def cost_model(device: torch.device | str) -> CostModel:
    """Return the cost model for a device; its ``source`` says which it is, and why.

    That is a model trained on such a device, if the folder in the setting ``cost_models`` has one
    and xgboost works. Otherwise it is a roofline.

    Raises:
        ValueError: if there is no such folder, or its files are no cost model.
    """
    if not settings.cost_models:
        return Roofline.of(device)
    folder, here = Path(settings.cost_models), Device.of(device)
    if not folder.is_dir():
        raise ValueError(f"expected a folder in PYG_ACCEL_COST_MODELS (got '{folder}')")
    if not (folder / here.slug).is_dir():
        return Roofline.of(device, f"no model of this device in '{folder}'")
    if why := unusable():
        return Roofline.of(device, why)
    return read(folder / here.slug, here)
