"""Gradients of operators, argument by argument.

A gradient is a function of the gradient of the result and of what else it reads, by the names of
its parameters: arguments of the operator, ``output`` for its result, ``x_rows`` and ``x_columns``
for the sizes of argument x, and ``arrays`` for the arrays of the graph. So the backward pass keeps
what the wanted gradients read, and nothing else.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Gradients", "derivative_of"]

Gradients = Mapping[str, Callable[..., Tensor]]

_SIZES = {"rows": 0, "columns": 1}
_ARRAYS = ("rowptr", "col", "eid", "rowptr_t", "col_t", "eid_t", "num_cols", "sorted")


def derivative_of(
    schema: str, gradients: Gradients
) -> tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]:
    """Return what keeps things for a backward pass, and the backward pass.

    Args:
        schema: of the operator.
        gradients: by the name of the argument; by other operators, so that they can be
            differentiated as well.
    """
    names = re.findall(r"(\w+)(?=[,)])", schema.partition("->")[0])
    read = {name: tuple(inspect.signature(g).parameters)[1:] for name, g in gradients.items()}
    arrays = [name for name in names if name in _ARRAYS]

    def setup(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True)) | {"output": output}
        wanted = [n for n in gradients if given[n] is not None and given[n].requires_grad]
        parameters = dict.fromkeys(p for name in wanted for p in read[name])
        kept: dict[str, Any] = {}
        for parameter in parameters:
            for name in arrays if parameter == "arrays" else (parameter,):
                if name in given:
                    kept[name] = given[name]
                else:
                    argument, _, size = name.rpartition("_")
                    kept[name] = given[argument].size(_SIZES[size])
        tensors = [name for name, value in kept.items() if isinstance(value, Tensor)]
        ctx.wanted, ctx.tensors = wanted, tensors
        ctx.save_for_backward(*(kept.pop(name) for name in tensors))
        ctx.others = kept

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        given = ctx.others | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))

        def argument(parameter: str) -> Any:
            return [given[n] for n in arrays] if parameter == "arrays" else given[parameter]

        found = {n: gradients[n](grad, *map(argument, read[n])) for n in ctx.wanted}
        return tuple(found.get(name) for name in names)

    return setup, differentiate
