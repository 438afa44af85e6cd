"""What torch functions do to lazy edge tensors.

Three kinds of rules, tried in this order:

* a function of one operand, row by row (an activation, a view, a linear layer on ``x_j``), is applied
  to the nodes instead of the edges;
* an elementwise function of several operands becomes part of the formula;
* a reduction over the target nodes runs the formula.

Anything else asks for the tensor itself: narrow ones are written out (E x heads at most), wide ones
raise :class:`Unrecognised` and PyG's own path takes over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Binary, Const, Formula, Operand, Unary, map_operands, operands_of
from pyg_accel.patching.lazy import LazyTensor, Trace, Unrecognised, is_single_side, plain_shape

__all__ = ["apply", "intercept", "reduce_over_targets"]

# Elements an edge up to which a tensor may be written out: attention scores of that many heads.
NARROW = 16

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]

_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


# -- the two ways in ---------------------------------------------------------------------------------


def intercept(trace: Trace, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Handle a torch function inside a trace: find gathers, follow views of edge_index."""
    name = _name(func)
    if name == "index_select" and len(args) + len(kwargs) == 3:
        source, dim, index = (*args, *kwargs.values())
        row = trace.row_of(index)
        if row is not None and not isinstance(source, LazyTensor):
            return trace.gather(source, dim, row)
    elif name == "__getitem__":
        source, index = args
        if source is trace.edge_index and type(index) is int:
            result = func(*args)
            trace.follow(result, index % 2)
            return result
        row = trace.row_of(index)
        if row is not None and not isinstance(source, LazyTensor):
            return trace.gather(source, 0, row)
    elif name == "unbind" and args[0] is trace.edge_index and len(args) + len(kwargs) == 1:
        rows = func(*args, **kwargs)
        for row, index in enumerate(rows):
            trace.follow(index, row)
        return rows
    elif name in _VIEWS and args and (row := trace.row_of(args[0])) is not None:
        if len(args) > 1 and isinstance(args[1], LazyTensor):  # index.expand_as(messages)
            result = args[0].expand(plain_shape(args[1]))
        else:
            result = func(*args, **kwargs)
        trace.follow(result, row)
        return result
    return func(*args, **kwargs)


_VIEWS = {"view", "reshape", "expand", "expand_as", "unsqueeze", "contiguous"}


def apply(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Handle a torch function with at least one lazy tensor among its arguments."""
    name = _name(func)
    if name == "__get__":
        return _attribute(func, args)
    if name in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    in_place = name.endswith("_") and not name.endswith("__") and name[:-1] in _RULES
    rule = _RULES.get(name[:-1] if in_place else name)
    if rule is not None:
        try:
            result = rule(func, args, kwargs)
        except _Declined:
            return _write_out(func, args, kwargs)
        if in_place and isinstance(args[0], LazyTensor):
            result = _assign(args[0], result)
        return result
    return _write_out(func, args, kwargs)


class _Declined(Exception):  # noqa: N818 - a rule that does not fit, not an error
    """A rule does not cover these arguments."""


_METADATA = {
    "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
    "get_device", "__len__", "ndimension", "is_signed", "is_inference", "__repr__", "__format__",
    "__hash__", "is_conj", "is_neg",
}  # fmt: skip
_PLAIN_ATTRIBUTES = {
    "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_cuda", "is_cpu",
    "is_meta", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn", "itemsize", "names",
    "is_leaf", "grad",
}  # fmt: skip


def _attribute(func: Callable[..., Any], args: Args) -> Any:
    name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
    lazy: LazyTensor = args[0]
    if name == "requires_grad":
        trace = lazy.tracer
        return any(trace.operands[o.index].requires_grad for o in operands_of(lazy.formula))
    if name in _PLAIN_ATTRIBUTES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    return getattr(_computed(lazy, f"Tensor.{name}"), name)


def _assign(target: LazyTensor, result: Any) -> LazyTensor:
    """Give an in-place function's result to the tensor it was called on."""
    if not isinstance(result, LazyTensor) or plain_shape(result) != plain_shape(target):
        raise Unrecognised("an in-place change of an edge tensor")
    target.formula, target.parts = result.formula, result.parts
    return target


def _write_out(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    name = _name(func)

    def real(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return _computed(value, name)
        if isinstance(value, (list, tuple)) and any(isinstance(v, LazyTensor) for v in value):
            return type(value)(real(v) for v in value)
        return value

    return func(*(real(a) for a in args), **{k: real(v) for k, v in kwargs.items()})


def _computed(lazy: LazyTensor, name: str) -> Tensor:
    shape = plain_shape(lazy)
    if shape.numel() > NARROW * max(shape[lazy.edge_dim], 1):
        raise Unrecognised(f"'{name}' on messages of {list(shape)}")
    return lazy.tracer.compute(lazy)


# -- elementwise functions ---------------------------------------------------------------------------


def _hoist(func: Callable[..., Any], lazy: LazyTensor, args: Args, kwargs: Kwargs) -> Any:
    """Apply a row-wise function to the operand of a lazy tensor instead of to the edges.

    The operand has its rows where the lazy tensor has its edges (dimension 0), so the arguments keep
    their meaning.
    """
    if not is_single_side(lazy) or lazy.edge_dim != 0:
        raise _Declined
    trace = lazy.tracer
    operand = lazy.formula
    assert isinstance(operand, Operand)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(trace.operands[operand.index], *args, **kwargs)

    def wrap(value: Tensor) -> LazyTensor:
        shape = [trace.num_edges, *value.shape[1:]]
        repeated = trace.repeated[operand.index]
        return trace.leaf(operand.side, value, shape, 0, repeated=repeated)

    return type(result)(map(wrap, result)) if isinstance(result, (list, tuple)) else wrap(result)


def _with_formula(lazy: LazyTensor, formula: Formula) -> LazyTensor:
    with torch._C.DisableTorchFunctionSubclass():
        return LazyTensor(lazy.tracer, formula, lazy.shape, lazy.edge_dim, lazy.dtype)


def _need_formula(lazy: Any) -> LazyTensor:
    if not isinstance(lazy, LazyTensor) or lazy.parts is not None:
        raise _Declined
    with torch._C.DisableTorchFunctionSubclass():
        if not lazy.dtype.is_floating_point:
            raise _Declined
    return lazy


def _unary(build: Callable[..., Formula]) -> Rule:
    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        lazy = _need_formula(args[0])
        in_place = _name(func).endswith("_") or kwargs.get("inplace", False)
        if is_single_side(lazy) and lazy.edge_dim == 0 and not in_place:
            return _hoist(func, lazy, args[1:], kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
        try:
            return _with_formula(lazy, build(lazy.formula, *args[1:], **kwargs))
        except TypeError:
            raise _Declined from None

    return rule


def _leaky_relu(x: Formula, negative_slope: float = 0.01) -> Formula:
    return Unary("leaky_relu", x, float(negative_slope))


def _elu(x: Formula, alpha: float = 1.0) -> Formula:
    negative = Unary("neg", Unary("relu", Unary("neg", x)))
    fall = Binary("sub", Unary("exp", negative), Const(1.0))
    return Binary("add", Unary("relu", x), Binary("mul", Const(float(alpha)), fall))


def _softplus(x: Formula, beta: float = 1.0, threshold: float = 20.0) -> Formula:
    if beta != 1 or threshold != 20:
        raise _Declined
    return Unary("softplus", x)


def _pow(x: Formula, exponent: float) -> Formula:
    if not isinstance(exponent, (int, float)):
        raise _Declined
    return Binary("mul", x, x) if exponent == 2 else Unary("pow", x, float(exponent))


def _clamp(x: Formula, min: float | None = None, max: float | None = None) -> Formula:
    if not isinstance(min, (int, float)) or max is not None:
        raise _Declined
    if min == 0:
        return Unary("relu", x)
    return Binary("add", Unary("relu", Binary("sub", x, Const(float(min)))), Const(float(min)))


for _op in ("neg", "abs", "exp", "log", "sqrt", "sigmoid", "tanh"):
    _RULES[_op] = _unary(lambda x, op=_op: Unary(op, x))
_RULES["__neg__"], _RULES["__abs__"] = _RULES["neg"], _RULES["abs"]
_RULES["relu"] = _unary(lambda x: Unary("relu", x))
_RULES["leaky_relu"] = _unary(_leaky_relu)
_RULES["elu"] = _unary(_elu)
_RULES["silu"] = _unary(lambda x: Binary("mul", x, Unary("sigmoid", x)))
_RULES["softplus"] = _unary(_softplus)
_RULES["square"] = _unary(lambda x: Binary("mul", x, x))
_RULES["reciprocal"] = _unary(lambda x: Binary("div", Const(1.0), x))
_RULES["rsqrt"] = _unary(lambda x: Binary("div", Const(1.0), Unary("sqrt", x)))
_RULES["pow"] = _RULES["__pow__"] = _unary(_pow)
_RULES["clamp"] = _RULES["clamp_min"] = _unary(_clamp)


def _binary(op: str, *, swap: bool = False) -> Rule:
    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if kwargs or len(args) != 2:
            raise _Declined
        left, right = (args[1], args[0]) if swap else args
        return _combine(op, left, right)

    return rule


for _op, _names in {
    "add": ("add", "__add__", "__iadd__"),
    "sub": ("sub", "subtract", "__sub__", "__isub__"),
    "mul": ("mul", "multiply", "__mul__", "__imul__"),
    "div": ("div", "divide", "true_divide", "__truediv__", "__itruediv__"),
}.items():
    for _each in _names:
        _RULES[_each] = _binary(_op)
for _op, _each in (("add", "__radd__"), ("sub", "__rsub__"), ("sub", "rsub"), ("mul", "__rmul__"),
                   ("div", "__rdiv__"), ("div", "__rtruediv__")):  # fmt: skip
    _RULES[_each] = _binary(_op, swap=True)
for _each in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
    _RULES[_each] = lambda func, args, kwargs, rule=_RULES[_each]: _assign(
        args[0], rule(func, args, kwargs)
    )


def _combine(op: str, left: Any, right: Any) -> LazyTensor:
    """Add an operation to the formula, or do it on the nodes if only one side takes part."""
    lead = _need_formula(left if isinstance(left, LazyTensor) else right)
    trace = lead.tracer
    a, b = _as_lazy(trace, left, lead), _as_lazy(trace, right, lead)
    shapes = [plain_shape(t) for t in (a, b) if isinstance(t, LazyTensor)]
    try:
        shape = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise Unrecognised("shapes that do not broadcast", sticky=False) from None
    edge_dim = len(shape) - (len(plain_shape(lead)) - lead.edge_dim)
    hoisted = _combine_on_nodes(op, a, b, shape, edge_dim)
    if hoisted is not None:
        return hoisted
    formula = Binary(op, _formula(a), _formula(b))
    with torch._C.DisableTorchFunctionSubclass():
        dtypes = [t.dtype for t in (a, b) if isinstance(t, LazyTensor)]
        zero_dim = [t.dim() == 0 for t in (left, right) if isinstance(t, Tensor)]
        if len(dtypes) == 2 and any(zero_dim):  # a 0-dim tensor does not widen the result
            dtypes = [lead.dtype]
    dtype = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
    return LazyTensor(trace, formula, shape, edge_dim, dtype)


def _formula(value: "LazyTensor | float") -> Formula:
    return value.formula if isinstance(value, LazyTensor) else Const(float(value))


def _as_lazy(trace: Trace, value: Any, lead: LazyTensor) -> "LazyTensor | float":
    """Bring an argument into the form of a formula: a number, or a tensor with an edge dimension."""
    if isinstance(value, LazyTensor):
        value = _need_formula(value)
        if len(plain_shape(value)) - value.edge_dim != len(plain_shape(lead)) - lead.edge_dim:
            raise Unrecognised("edge dimensions that do not meet", sticky=False)
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise _Declined
    from_right = len(plain_shape(lead)) - lead.edge_dim
    place = value.dim() - from_right
    if place >= 0 and value.size(place) == trace.num_edges:  # one row an edge
        return trace.leaf("e", value.movedim(place, 0), value.shape, place)
    if place >= 0 and value.size(place) != 1:
        raise Unrecognised("shapes that do not broadcast", sticky=False)
    # The same for every edge: one row that all targets share.
    value = value.reshape((1,) * max(0, -place) + tuple(value.shape))
    place = max(0, place)
    shape = [*value.shape]
    shape[place] = trace.num_edges
    return trace.leaf("v", value.movedim(place, 0), shape, place, repeated=True)


def _combine_on_nodes(
    op: str, a: "LazyTensor | float", b: "LazyTensor | float", shape: torch.Size, edge_dim: int
) -> LazyTensor | None:
    """Do an operation on the rows of one side: nodes with nodes of that side, shared rows, numbers."""
    lazies = [t for t in (a, b) if isinstance(t, LazyTensor)]
    if edge_dim != 0 or not all(is_single_side(t) and t.edge_dim == 0 for t in lazies):
        return None
    trace = lazies[0].tracer
    operands = [t.formula for t in lazies if isinstance(t.formula, Operand)]
    own = {o.side for o in operands if not trace.repeated[o.index]}
    if len(own) > 1 or own == {"e"} and len(lazies) == 2:
        return None
    ranks = {trace.operands[o.index].dim() for o in operands}
    if len(ranks) > 1:
        return None
    values = [trace.operands[t.formula.index] if isinstance(t, LazyTensor)  # type: ignore[union-attr]
              else t for t in (a, b)]  # fmt: skip
    with torch._C.DisableTorchFunctionSubclass():
        result = getattr(torch, op)(*values) if isinstance(values[0], Tensor) else {
            "add": lambda x, y: y + x, "sub": lambda x, y: x - y,
            "mul": lambda x, y: y * x, "div": lambda x, y: x / y,
        }[op](*values)  # fmt: skip
    side = own.pop() if own else "v"
    repeated = all(trace.repeated[o.index] for o in operands)
    return trace.leaf(side, result, [trace.num_edges, *result.shape[1:]], 0, repeated=repeated)


# -- shapes ------------------------------------------------------------------------------------------


@_rule("clone", "contiguous", "alias")
def _identity(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return _with_formula(_need_formula(args[0]), args[0].formula)


@_rule("detach")
def _detach(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return _map_operands(_need_formula(args[0]), lambda t: t.detach(), plain_shape(args[0]))


@_rule("to", "type_as", "float", "double", "half", "bfloat16")
def _convert(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = _need_formula(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty((), dtype=lazy.dtype, device=lazy.device)
        result = func(like, *args[1:], **kwargs)
        if result.dtype != like.dtype or result.device != like.device:
            return _hoist(func, lazy, args[1:], kwargs)
    return lazy


@_rule("dropout")
def _dropout(
    func: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    lazy = _need_formula(args[0])
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    if training and p > 0:
        raise _Declined
    return lazy


def _map_operands(
    lazy: LazyTensor, change: Callable[[Tensor], Tensor], shape: torch.Size
) -> LazyTensor:
    trace = lazy.tracer

    def replace(operand: Operand) -> Formula:
        number = trace.add_operand(
            change(trace.operands[operand.index]), repeated=trace.repeated[operand.index]
        )
        return Operand(operand.side, number)

    with torch._C.DisableTorchFunctionSubclass():
        formula = map_operands(lazy.formula, replace)
        return LazyTensor(trace, formula, shape, lazy.edge_dim, lazy.dtype)


@_rule("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = _need_formula(args[0]) if args[0].parts is None else args[0]  # type: ignore[union-attr]
    if lazy.parts is not None or lazy.edge_dim != 0:
        raise _Declined
    with torch._C.DisableTorchFunctionSubclass():
        old = tuple(lazy.shape)
        args = tuple(a.shape if isinstance(a, Tensor) else a for a in args[1:])
        name = {"view_as": "view", "reshape_as": "reshape"}.get(_name(func), _name(func))
        new = getattr(torch.empty(old, device="meta"), name)(*args, **kwargs).shape
        if len(new) == 0 or new[0] != old[0]:
            raise _Declined
        return _map_operands(lazy, lambda t: _reshape_rows(t, old[1:], tuple(new[1:])), new)


def _reshape_rows(operand: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """Reshape an operand [rows, ...] the way its message went from trailing shape old to new."""
    own = (1,) * (len(old) - operand.dim() + 1) + tuple(operand.shape[1:])
    rows = operand.size(0)
    if own == old:
        return operand.reshape(rows, *new)
    if all(n == 1 for n in own):
        return operand.reshape(rows, *(1,) * len(new))
    # Broadcast in some dimensions: only dimensions of size 1 may come or go.
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        raise _Declined
    kept = iter(mine for mine, full in zip(own, old, strict=True) if full != 1)
    return operand.reshape(rows, *(next(kept) if n != 1 else 1 for n in new))


@_rule("__getitem__", "narrow", "select", "chunk", "split", "tensor_split")
def _pick(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = args[0]
    if not isinstance(lazy, LazyTensor) or not _leaves_edges_alone(func, args, kwargs):
        raise _Declined
    if lazy.parts is not None:
        return _cat([_pick_part(func, part, args[1:], kwargs) for part in lazy.parts])
    return _hoist(func, lazy, args[1:], kwargs)


def _pick_part(func: Callable[..., Any], part: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if args and isinstance(args[0], tuple) and len(args[0]) >= part.dim():
            raise _Declined  # it would reach into the concatenated dimension
    if isinstance(part, LazyTensor):
        result: Tensor = _hoist(func, part, args, kwargs)
        return result
    picked: Tensor = func(part, *args, **kwargs)
    return picked


def _leaves_edges_alone(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    if _name(func) == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index)
        return plain and (index[0] is Ellipsis or index[0] == slice(None))
    place = 1 if _name(func) in ("narrow", "select") else 2
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    return bool(dim % len(plain_shape(args[0])) != 0)


# -- linear layers, concatenation, sums over features ---------------------------------------------------


@_rule("linear")
def _linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    lazy, weight, bias = given["input"], given["weight"], given.get("bias")
    if not isinstance(lazy, LazyTensor) or lazy.edge_dim != 0:
        raise _Declined
    if lazy.parts is None:
        return _hoist(func, _need_formula(lazy), (weight, bias), {})
    # A linear layer of a concatenation is a sum of linear layers, each on its own nodes.
    total: Any = None
    start = 0
    for part in lazy.parts:
        stop = start + plain_shape(part)[-1]
        columns = weight[:, start:stop]
        start = stop
        if isinstance(part, LazyTensor):
            term: Any = _hoist(func, part, (columns, bias), {})
        else:
            term = func(part, columns, bias)
        bias = None
        total = term if total is None else total + term
    return total


@_rule("cat", "concat", "concatenate")
def _concatenate(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    lead = next(t for t in tensors if isinstance(t, LazyTensor))
    rank = len(plain_shape(lead))
    if dim % rank != rank - 1 or rank < 2 or lead.edge_dim != 0:
        raise _Declined
    return _cat(tensors)


def _cat(tensors: list[Any]) -> LazyTensor:
    lead = next(t for t in tensors if isinstance(t, LazyTensor))
    parts: list[Tensor] = []
    for t in tensors:
        parts += t.parts if isinstance(t, LazyTensor) and t.parts is not None else [t]
    if any(plain_shape(t)[0] != lead.tracer.num_edges for t in parts):
        raise _Declined
    if any(isinstance(t, LazyTensor) and not is_single_side(t) for t in parts):
        raise _Declined
    with torch._C.DisableTorchFunctionSubclass():
        shape = [*lead.shape[:-1], sum(t.shape[-1] for t in parts)]
        return LazyTensor(lead.tracer, Const(0.0), shape, 0, lead.dtype, tuple(parts))


@_rule("stack")
def _stack(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Stack messages of one formula by stacking their operands."""
    tensors = [_need_formula(t) for t in args[0]]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    lead = tensors[0]
    shape = plain_shape(lead)
    if dim % (len(shape) + 1) == 0 or any(t.edge_dim != 0 for t in tensors):
        raise _Declined
    trace = lead.tracer
    lists = [list(operands_of(t.formula)) for t in tensors]
    patterns = {
        str(map_operands(t.formula, lambda o, seen=iter(range(99)): Operand(o.side, next(seen))))
        for t in tensors
    }
    if len(patterns) > 1 or any(plain_shape(t) != shape for t in tensors):
        raise _Declined
    numbers = []
    for group in zip(*lists, strict=True):
        operands = [trace.operands[o.index] for o in group]
        if any(t.shape[1:] != shape[1:] for t in operands) or any(
            trace.repeated[o.index] for o in group
        ):
            raise _Declined
        numbers.append(trace.add_operand(torch.stack(operands, dim)))
    place = iter(numbers)
    formula = map_operands(lead.formula, lambda o: Operand(o.side, next(place)))
    full = [*shape]
    full.insert(dim % (len(shape) + 1), len(tensors))
    with torch._C.DisableTorchFunctionSubclass():
        return LazyTensor(trace, formula, full, 0, lead.dtype)


@_rule("sum")
def _sum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A sum over the last dimension: on the nodes, or a dot product along the edges."""
    lazy = _need_formula(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    rank = len(plain_shape(lazy))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if len(dims) != 1 or dims[0] is None or dims[0] % rank != rank - 1 or rank < 2:
        raise _Declined
    if lazy.edge_dim != 0 or set(kwargs) - {"dim", "keepdim"}:
        raise _Declined
    if is_single_side(lazy):
        return _hoist(func, lazy, args[1:], kwargs)
    out = lazy.tracer.dot(lazy)
    return out.unsqueeze(-1) if keepdim else out


# -- reductions over the target nodes ------------------------------------------------------------------


@_rule("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like")
def _new(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty((), dtype=lazy.dtype, device=lazy.device)
        if _name(func).endswith("_like"):
            like = like.expand(lazy.shape)
        return func(like, *args[1:], **kwargs)


def reduce_over_targets(lazy: LazyTensor, reduces: list[str], num_rows: int | None) -> list[Tensor]:
    """Reduce messages over their target nodes, several ways in one pass."""
    return lazy.tracer.reduce(_need_message(lazy), reduces, num_rows)


def _need_message(lazy: LazyTensor) -> LazyTensor:
    try:
        return _need_formula(lazy)
    except _Declined:
        raise Unrecognised("messages that are not floating-point features") from None


def _scattered(args: Args, names: tuple[str, ...], kwargs: Kwargs) -> dict[str, Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    lazy = given.get("src")
    out, dim = given["self"], given["dim"]
    if not isinstance(lazy, LazyTensor) or isinstance(out, LazyTensor):
        raise _Declined
    lazy = _need_message(lazy)
    if lazy.tracer.row_of(given["index"]) != lazy.tracer.target:
        raise _Declined
    if dim % out.dim() != lazy.edge_dim or out.dim() != len(plain_shape(lazy)):
        raise _Declined
    return given


@_rule("scatter_add")
def _scatter_add(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    given = _scattered(args, ("self", "dim", "index", "src"), kwargs)
    lazy, out = given["src"], given["self"]
    (total,) = reduce_over_targets(lazy, ["sum"], out.size(lazy.edge_dim))
    return out.add_(total) if _name(func).endswith("_") else out + total


_SCATTER_REDUCES = {"sum": "sum", "mean": "mean", "prod": "prod", "amax": "max", "amin": "min"}


@_rule("scatter_reduce")
def _scatter_reduce(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    given = _scattered(args, ("self", "dim", "index", "src", "reduce"), kwargs)
    lazy, out, reduce = given["src"], given["self"], _SCATTER_REDUCES[given["reduce"]]
    start = 1.0 if reduce == "prod" else 0.0  # what the kernels give to targets without edges
    if given.get("include_self", True) != (reduce == "prod") or not bool((out == start).all()):
        raise _Declined
    (result,) = reduce_over_targets(lazy, [reduce], out.size(lazy.edge_dim))
    return out.copy_(result) if _name(func).endswith("_") else result
