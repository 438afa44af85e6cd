"""What primitives cost: learned models, and a roofline where there are none."""

from pathlib import Path

import torch

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import CostModel, Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.learned import SHIPPED, Learned, read, unusable
from pyg_accel.rewrite.cost.roofline import Roofline
from pyg_accel.settings import settings

__all__ = ["CostModel", "Device", "GraphFeatures", "Learned", "Primitive", "Roofline", "cost_model"]


def cost_model(device: torch.device | str) -> CostModel:
    """Return what decides on a device; its ``source`` says what that is, and why.

    Models that were learned on such a device come first: those of the folder that the setting
    ``cost_models`` names, then those that are shipped. Otherwise the roofline decides, as it
    does without an xgboost that works.

    Raises:
        ValueError: for a folder that is not there, or files in it that hold no cost models.
    """
    here = Device.of(device)
    folder = _folder_of(here)
    if folder is None:
        why = "no models were learned on such a device; `python -m pyg_accel profile` makes them"
        return Roofline.of(device, why)
    if why := unusable():
        return Roofline.of(device, why)
    model = read(folder)
    if model.device != here:
        raise ValueError(f"the cost models in '{folder}' are of {model.device}, not of {here}")
    return model


def _folder_of(device: Device) -> Path | None:
    places = [SHIPPED]
    if settings.cost_models:
        own = Path(settings.cost_models)
        if not own.is_dir():
            raise ValueError(f"expected a folder in PYG_ACCEL_COST_MODELS (got '{own}')")
        places.insert(0, own)
    return next((p / device.slug for p in places if (p / device.slug).is_dir()), None)
