"""Copies of modules that share what they hold, for models that are not to change."""

import torch
from torch import Tensor

from pyg_accel.patching import embedding

__all__ = ["Embedding", "clone", "with_embeddings"]


def clone(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the same parameters and a table of children of its own."""
    copied = module.__class__.__new__(module.__class__)
    vars(copied).update(vars(module))
    vars(copied)["_modules"] = dict(module._modules)
    return copied


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` with the gradient that ``patch()`` gives it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., F] for ids [...]."""
        rows: Tensor = embedding.forward(torch.nn.Embedding.forward, self, input, always=True)
        return rows


def with_embeddings(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that has such embeddings; itself if it has none at all."""
    if not any(type(m) is torch.nn.Embedding for m in module.modules()):
        return module
    copied = clone(module)
    if type(module) is torch.nn.Embedding:
        copied.__class__ = Embedding
    for name, child in module._modules.items():
        if child is not None:
            copied._modules[name] = with_embeddings(child)
    return copied
