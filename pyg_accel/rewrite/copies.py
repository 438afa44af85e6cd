"""Copies of modules that share what they hold, for models that are not to change."""

from types import MethodType

import torch
from torch import Tensor

from pyg_accel.patching import embedding

__all__ = ["Embedding", "Twins", "clone", "give_back", "with_embeddings"]


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
    """Return a copy with modes of its own; its embeddings have such a gradient."""
    copied = Twins()(module)
    for inner in copied.modules():
        if type(inner) is torch.nn.Embedding:
            inner.__class__ = Embedding
    return copied


class Twins:
    """Copies of modules that share all they have with the originals, but for their modes.

    Copying a module again brings its copy up to date; :func:`give_back` does it the other way.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._known: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}

    @classmethod
    def of(cls, module: torch.nn.Module, copied: torch.nn.Module) -> "Twins":
        """Return one that knows a copy that was made."""
        made = cls()
        copies = dict(copied.named_modules(remove_duplicate=False))
        for path, inner in module.named_modules(remove_duplicate=False):
            if path in copies:
                made._known[id(inner)] = (inner, copies[path])
        return made

    def __call__(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the copy of a module; its children are copies too."""
        copied = self._known.get(id(module), (module, None))[1]
        if copied is None:
            copied = module.__class__.__new__(module.__class__)
            vars(copied).update(training=module.training, _modules={})
            self._known[id(module)] = (module, copied)
        own = vars(copied)
        if type(copied) is not type(module):
            copied.__class__ = module.__class__
        mode = own["training"]
        children: dict[str, torch.nn.Module | None] = own["_modules"]
        own.clear()
        for name, value in vars(module).items():
            bound = isinstance(value, MethodType) and value.__self__ is module
            own[name] = MethodType(value.__func__, copied) if bound else value
        own["training"] = mode
        twins = {n: None if m is None else self(m) for n, m in module._modules.items()}
        children.clear()
        children.update(twins)
        own["_modules"] = children
        return copied


def give_back(copied: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Give a module the attributes that its copy was assigned; return whether there were any."""
    own, changed = vars(module), False
    for name, value in vars(copied).items():
        if own.get(name) is value or name in ("training", "_modules"):
            continue
        if not isinstance(value, MethodType):  # others are those of each
            own[name], changed = value, True
    return changed
