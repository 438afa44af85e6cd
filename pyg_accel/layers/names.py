"""Parameters, buffers and modules of a graph under the names, and in the order, of the original."""

from collections.abc import Callable

import torch
from torch import fx

__all__ = ["keep_names"]

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def keep_names(
    made: fx.GraphModule,
    model: torch.nn.Module,
    copied: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module,
) -> None:
    """Give a graph what torch.fx left out, so that both have the same ``state_dict``.

    The tables of parameters and buffers are shared: what is assigned to one is the other's too.

    Args:
        made: a graph of the calls of a model.
        model: the model.
        copied: of a module that no call refers to, what the graph gets.
    """
    known: dict[int, torch.nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        siblings = made.get_submodule(parent)._modules
        if path and siblings.get(name) is None:
            siblings[name] = known.get(id(module)) or copied(module)
        target = made.get_submodule(path)
        known.setdefault(id(module), target)
        own = vars(target)
        for table in ("_parameters", "_buffers"):
            if own[table] is vars(module)[table]:
                continue
            for key, value in own[table].items():  # a tensor that the code makes is no buffer
                if key not in vars(module)[table]:
                    own[key] = value
        own.update({table: vars(module)[table] for table in _TABLES})
    for path, module in model.named_modules(remove_duplicate=False):
        children = made.get_submodule(path)._modules
        for name in [*module._modules, *(n for n in children if n not in module._modules)]:
            if name in children:
                children[name] = children.pop(name)
