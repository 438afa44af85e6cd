"""Whether the tensors of edges that a layer puts aside, attention weights above all, leave it.

Weights that leave are ordinary tensors, of which the result is computed. Those that are gone when
the layer returns need not exist.
"""

import ast
import inspect
import sys
import textwrap
import weakref
from functools import lru_cache
from types import CodeType

from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.cache import memory_of
from pyg_accel.formula import Formula, Operand, children, map_operands, operands_of
from pyg_accel.patching.edge_tensors import DeferredOperand, plain_shape
from pyg_accel.patching.lazy import LazyTensor, first_operand, is_single_side
from pyg_accel.syntax import module_tree

__all__ = ["KEEPS", "clears", "edge_operand", "is_part", "returns_none", "writes_weights"]

_ASKED = "return_attention_weights"
# Layers that were seen to leave their attention weights in an attribute.
KEEPS: "weakref.WeakSet[MessagePassing]" = weakref.WeakSet()


def returns_none(module: MessagePassing) -> CodeType | None:
    """Return the code of the running ``forward`` if its caller asked for no attention weights.

    None as well where the ``forward`` has no such argument: nobody knows what it returns.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        if _ASKED in frame.f_code.co_varnames:
            given = frame.f_locals
            mine = given.get(frame.f_code.co_varnames[0]) is module
            return frame.f_code if mine and given.get(_ASKED, _ASKED) is None else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def writes_weights(module: MessagePassing, function: str, code: CodeType | None) -> bool:
    """Return whether a call of ``propagate`` or ``edge_updater`` writes its softmax weights out.

    Args:
        module: the layer.
        function: which of the two.
        code: what :func:`returns_none` says.
    """
    return code is None and (function == "edge_updater" or module in KEEPS)


@lru_cache(maxsize=256)
def clears(code: CodeType, name: str) -> bool:
    """Return whether a ``forward`` sets an attribute of its layer to None."""
    try:
        tree = module_tree(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return False
    target = f"{code.co_varnames[0]}.{name}"
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and target in map(ast.unparse, node.targets)
        for node in ast.walk(tree)
    )


def edge_operand(lazy: LazyTensor) -> Tensor | None:
    """Return the ordinary tensor of edges that a lazy one stands for, if it is one as it was."""
    if not is_single_side(lazy) or lazy.edge_dim != 0:
        return None
    operand = first_operand(lazy)
    whole = plain_shape(operand) == plain_shape(lazy)
    return operand if lazy.formula.side == "e" and whole else None  # type: ignore[union-attr]


def is_part(lazy: LazyTensor) -> bool:
    """Return whether a lazy tensor with gradients is a term of what its call has computed."""
    if lazy.parts is not None or edge_operand(lazy) is not None:
        return False
    operands = [lazy.tracer.operands[o.index] for o in operands_of(lazy.formula)]
    if not lazy.tracer.records_gradients or not any(map(_has_gradients, operands)):
        return False
    term = _of_memory(lazy, lazy.formula)
    return any(_contains(_of_memory(lazy, formula), term) for formula in lazy.tracer.read)


def _has_gradients(operand: Tensor) -> bool:
    if isinstance(operand, DeferredOperand):
        return operand.differentiable()
    return operand.requires_grad


def _of_memory(lazy: LazyTensor, formula: Formula) -> Formula:
    """A formula that refers to operands by their memory, which views share."""

    def place(operand: Operand) -> Operand:
        tensor = lazy.tracer.operands[operand.index]
        waits = isinstance(tensor, DeferredOperand)
        return Operand(operand.side, id(tensor) if waits else memory_of(tensor))

    return map_operands(formula, place)


def _contains(formula: Formula, term: Formula) -> bool:
    return formula == term or any(_contains(part, term) for part in children(formula))
