"""What all ranks must have in common, looked at before they depend on it."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric
from torch import Tensor

import pyg_accel
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable, PartitionMismatch

__all__ = ["agree", "digest", "model_facts", "versions"]

_FEW = 4  # facts that a message lists


def agree(wire: Wire, look: Callable[[], dict[str, str]]) -> None:
    """Compare what every rank finds; where they differ, or one cannot go on, all ranks raise.

    Args:
        wire: the group.
        look: returns facts by name, or raises a ValueError that says what is wrong here.

    Raises:
        PartitionMismatch: if a fact differs.
        NotDistributable: if some rank found something wrong; the message has all that was found.
    """
    failed: ValueError | None = None
    facts: dict[str, str] = {}
    looked = False
    try:
        facts = look()
        looked = True
    except ValueError as error:
        failed, looked = error, True
    finally:
        if not looked:  # another error, which goes on: the others must not wait for this rank
            wire.texts({"facts": {}, "wrong": "an error that is no fault of the input"})
    every = wire.texts({"facts": facts, "wrong": None if failed is None else str(failed)})
    wrong = {rank: said["wrong"] for rank, said in enumerate(every) if said["wrong"] is not None}
    if wrong:
        first = next(iter(wrong.values()))
        same = len(wrong) == wire.size and all(text == first for text in wrong.values())
        text = first if same else "; ".join(f"rank {r}: {text}" for r, text in wrong.items())
        raise NotDistributable(text) from failed
    found = [said["facts"] for said in every]
    names = dict.fromkeys(name for each in found for name in each)
    differing = [n for n in names if len({each.get(n) for each in found}) > 1]
    if differing:
        lines = [f"ranks differ in {len(differing)} of {len(names)} things they must share"]
        for name in differing[:_FEW]:
            values = ", ".join(f"rank {r}: {each.get(name)}" for r, each in enumerate(found))
            lines.append(f"  {name}: {values}")
        raise PartitionMismatch("\n".join(lines))


def versions() -> dict[str, str]:
    """Return the versions that decide how a model runs."""
    return {
        "pyg_accel": pyg_accel.__version__,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }


def model_facts(model: torch.nn.Module) -> dict[str, str]:
    """Return the names, shapes and dtypes of a model's parameters and buffers, and its classes."""
    facts = {"model": ", ".join(type(m).__name__ for m in model.modules())}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            shape = (
                "not known yet"
                if type(tensor).__name__.startswith("Uninit")
                else (f"{list(tensor.shape)}")
            )
            grad = ", learned" if tensor.requires_grad else ""
            facts[f"{kind} {name}"] = f"{shape} {tensor.dtype}{grad}"
    if len(facts) > 200:  # a line a parameter says no more of a large model
        text = "\n".join(f"{k}: {v}" for k, v in facts.items())
        facts = {"model": hashlib.sha256(text.encode()).hexdigest()[:16]}
    return facts


def digest(tensor: Any) -> str:
    """Return a short text that differs where shape, dtype or numbers do, as good as surely."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    found = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    if tensor.numel() and tensor.layout == torch.strided:
        whole = tensor.detach().contiguous().view(-1)
        numbers = whole.view(torch.uint8)
        numbers = numbers[: numbers.numel() // 8 * 8].view(torch.int64)
        places = torch.arange(numbers.numel(), device=numbers.device)
        mixed = (numbers ^ (places * -7046029254386353131)) * -4417276706812531889
        mixed = (mixed ^ (mixed >> 29)).sum()
        rest = whole.view(torch.uint8)[numbers.numel() * 8 :].tolist()
        found.update(f"{int(mixed)} {rest}".encode())
    return f"{list(tensor.shape)} {found.hexdigest()[:12]}"
