"""The replaced functions of PyG: the only file that uses its private names.

An accelerated function of PyG remains the same object: only its ``__code__`` changes, which passes
the arguments to a hook, and :func:`uninstall` restores it. So functions can be pickled and
compared, names that others replace meanwhile are not touched, and earlier imports of a function
reach the hook as well. No assignment to a module or class does that: modules import functions by
name, and instances and subclasses hold rendered methods under other names. The code is compiled
from text, as code with another closure than that of its function crashes Python where its frame is
looked at. These functions are:

* ``propagate`` and ``edge_updater``, which PyG renders for a subclass of MessagePassing with its
  first instance, and the method of MessagePassing that renders them, for later classes.
* ``MessagePassing._collect``, which only the reference ``propagate`` of explainers and feature
  decomposition calls: the hook adds a row to the report.
* ``Aggregation.__call__``, which reduces messages.
* functions that derive an edge_index from another at every call (``gcn_norm``, self-loops, masks):
  see :mod:`pyg_accel.graph.memo`.
* ``softmax`` over target nodes, ``spmm``, and ``scatter`` of extremes on a GPU.
* while a model is distributed, also ``degree``, ``global_add_pool`` and its like, and the ``group``
  of HANConv.
* ``RGCNConv.forward`` and ``HeteroConv.forward``, which loop over relations.
* ``NeighborSampler._sample``, which draws the mini-batches of neighbour loaders, its ``__init__``,
  and those of ``BidirectionalNeighborSampler``, ``NodeLoader`` and ``LinkLoader``.
* ``to_csc``, by which samplers sort edges by target.
* ``collate``, which puts graphs into a batch.

Added methods are ``MessagePassing._call_impl``, by which torch runs the forward of a layer and its
hooks, as results are stored only inside of it; and a method for compilers.
"""

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables.functions import _spec_cache
from torch.compiler import is_dynamo_compiling
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.nn import HeteroConv, MessagePassing, RGCNConv
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.sampler import BidirectionalNeighborSampler, NeighborSampler
from torch_geometric.utils import is_sparse

from pyg_accel.runtime.state import running

__all__ = [
    "Hooks", "install", "installed", "is_rendered", "rendering_reason", "template",
    "uninstall",
]  # fmt: skip

_ORIGINAL = "__original_fn"  # attribute of wrappers by torch.jit.script_if_tracing
_SCRIPTED = "__script_if_tracing_wrapper"
_WRAPPED = "__wrapped__"
_RENDERED = {"propagate": "_jinja_propagate", "edge_updater": "_jinja_edge_updater"}
# The methods that render them in PyG 2.8 and 2.9; without one, all classes share the reference.
_RENDERS = next((n for n in ("_set_jittable_templates", "_set_templates")
                 if hasattr(MessagePassing, n)), "")  # fmt: skip
_HOMES = ("torch.", "torch_geometric.", "torch_sparse.")
_HOOKED = {  # the hook of each function, by where PyG and torch_sparse define or export it
    "torch_geometric.nn.conv.gcn_conv.gcn_norm": "memoise",
    "torch_geometric.nn.conv.rgcn_conv.masked_edge_index": "memoise",  # the edges of one relation
    "torch_geometric.utils.hetero.construct_bipartite_edge_index": "memoise",  # of all of them
    "torch_geometric.utils.add_self_loops": "memoise",
    "torch_geometric.utils.remove_self_loops": "memoise",
    "torch_geometric.utils.add_remaining_self_loops": "memoise",
    "torch_geometric.utils.get_laplacian": "memoise",
    "torch_sparse.set_diag": "memoise",
    "torch_sparse.fill_diag": "memoise",
    "torch_geometric.utils.softmax": "softmax",
    "torch_geometric.utils.spmm": "spmm",
    "torch_geometric.utils.scatter": "scatter",
    "torch_geometric.utils.degree": "degree",  # from here on while a model is distributed
    "torch_geometric.nn.conv.han_conv.group": "group",
    "torch_geometric.nn.global_add_pool": "pool",
    "torch_geometric.nn.global_mean_pool": "pool",
    "torch_geometric.nn.global_max_pool": "pool",
    "torch_geometric.data.collate.collate": "collate",
    "torch_geometric.sampler.utils.to_csc": "to_csc",
}
# The hook of each method, and whether it also runs inside of calls that are left to PyG.
_METHODS: tuple[tuple[type, str, str, bool], ...] = (
    *(
        ((MessagePassing, _RENDERS, "render", True), (MessagePassing, "_collect", "bypassed", True))
        if _RENDERS
        else ((MessagePassing, name, "call", False) for name in _RENDERED)
    ),
    (Aggregation, "__call__", "aggregate", False),
    (RGCNConv, "forward", "relations", False),
    (HeteroConv, "forward", "hetero", True),
    (NeighborSampler, "__init__", "sampler", True),
    (NeighborSampler, "_sample", "sample", True),
    (BidirectionalNeighborSampler, "__init__", "both_directions", True),
    (NodeLoader, "__init__", "load", True),
    (LinkLoader, "__init__", "load", True),
)

# Added methods, and their hooks.
_ADDED: tuple[tuple[type, str, str], ...] = (
    (MessagePassing, "_call_impl", "layer"),
    (MessagePassing, "_pyg_accel_read", "dynamo_entry"),
)

# Hooks by name. Each takes the original function first, except for added methods.
Hooks = Mapping[str, Callable[..., Any]]

_lock = threading.RLock()
_log = logging.getLogger("pyg_accel")


class _Replaced(NamedTuple):
    """A replaced function: the original, and its replaced attributes."""

    original: Any
    attributes: dict[str, Any]
    hook: Callable[..., Any]
    always: bool
    code: CodeType
    kwdefaults: dict[str, Any]

    def is_of(self, function: Any, hook: Callable[..., Any], *, always: bool) -> bool:
        """Return whether a function has not changed since, and gets the same hook."""
        original, code, was = self.original, function.__code__, (self.hook, self.always)
        return (
            (code is original.__code__ and was == (hook, always))
            and function.__defaults__ is original.__defaults__
            and function.__kwdefaults__ == original.__kwdefaults__
            and vars(function) == self.attributes
        )

    def put_back(self, function: Any) -> None:
        """Restore a function, unless others have replaced its code."""
        if function.__code__ is self.code:
            function.__code__ = self.original.__code__
            function.__kwdefaults__ = self.original.__kwdefaults__
            _spec_cache.pop(function, None)
            for name in (_WRAPPED, _ORIGINAL, _SCRIPTED):
                vars(function).pop(name, None)
            vars(function).update(self.attributes)


# By function, also while nothing is installed, as programs compare attributes of functions.
_replaced: "weakref.WeakKeyDictionary[Any, _Replaced]" = weakref.WeakKeyDictionary()
_hooks: Hooks = {}
# Every layer calls is_sparse(). While hooks are installed it has another code object, equal to its
# own, so that Dynamo's guards fail and compile the model again.
_codes = is_sparse.__code__, is_sparse.__code__.replace()
_handed_over: list[Any] = []


def installed() -> bool:
    """Return whether functions of PyG are replaced now."""
    return bool(_handed_over)


def install(hooks: Hooks) -> None:
    """Replace the functions in the docstring of this module; a second call does nothing.

    Args:
        hooks: the hooks in :mod:`pyg_accel.patching.api`, and those of a distributed model.
    """
    global _hooks
    with _lock:
        if _handed_over:
            return
        _hooks = {**hooks, "render": _render}
        for cls in dict.fromkeys(_subclasses(MessagePassing)):
            _hand_over_class(cls)
        for cls, name, hook, always in _METHODS:
            if _is_stock(vars(cls).get(name)):
                _hand_over(vars(cls)[name], _hooks[hook], always=always)
        for path, hook in _HOOKED.items():
            module, _, name = path.rpartition(".")
            function: Any = getattr(sys.modules.get(module), name, None)
            if hook in hooks and _is_stock(function):
                _hand_over(function, hooks[hook])
                skip_code(function.__code__)  # Dynamo begins no graph there after a break
        for cls, name, hook in _ADDED:
            if name not in vars(cls):
                setattr(cls, name, hooks[hook])
        is_sparse.__code__ = _codes[1]


def uninstall() -> None:
    """Restore all functions that others have not replaced."""
    with _lock:
        while _handed_over:
            function = _handed_over.pop()
            _replaced[function].put_back(function)
        for cls, name, _ in _ADDED:
            if getattr(vars(cls).get(name), "__module__", "").startswith("pyg_accel."):
                delattr(cls, name)
        is_sparse.__code__ = _codes[0]


def _render(original: Any, self: MessagePassing, raise_on_error: bool = False) -> None:
    original(self, raise_on_error)
    with _lock:
        if _handed_over:
            _hand_over_class(type(self))


def _is_stock(function: Any) -> bool:
    """Whether a function is PyG's own."""
    return isinstance(function, FunctionType) and function.__module__.startswith(_HOMES)


def _hand_over(function: Any, hook: Callable[..., Any], *, always: bool = False) -> None:
    """Let a function pass its original and its arguments to a hook.

    Inside of calls that are left to PyG the original runs, unless ``always``.

    TorchScript and Dynamo find the source of the original by the attributes of
    torch.jit.script_if_tracing. Dynamo counts recompilations by code, so each function has its own.
    """
    if _ORIGINAL in vars(function):
        return
    entry = _replaced.get(function)
    if entry is None or not entry.is_of(function, hook, always=always):
        entry = _replaced[function] = _replacement(function, hook, always=always)
    function.__kwdefaults__ = entry.kwdefaults
    vars(function).update({_WRAPPED: entry.original, _ORIGINAL: entry.original, _SCRIPTED: True})
    function.__code__ = entry.code
    _spec_cache.pop(function, None)  # Dynamo remembers parameters by function, not by code
    _handed_over.append(function)


def _replacement(function: Any, hook: Callable[..., Any], *, always: bool) -> _Replaced:
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    functools.update_wrapper(original, function)
    attributes = dict(vars(function))
    vars(original).pop(_WRAPPED)
    vars(original).update(attributes)
    original.__kwdefaults__ = function.__kwdefaults__
    code = _code_for(function, always=always)
    hooks = {"_original": original, "_hook": hook, "_running": running,
             "_compiles": is_dynamo_compiling}  # fmt: skip
    kwdefaults = {**(function.__kwdefaults__ or {}), **hooks}
    return _Replaced(original, attributes, hook, always, code, kwdefaults)


# The replacing code. It keeps globals and closure of a function, but only reads arguments; it names
# the variables of the closure because Python and Dynamo expect them.
_HANDS_OVER = """
def with_closure({closure}):
    def hands_over(*args, _original, _hook, _running, _compiles, **kwargs):
        {stock}return _hook(_original, *args, **kwargs)
        {closure}
    return hands_over
"""
_IF_STOCK = """if not _compiles() and _running.stock:
            return _original(*args, **kwargs)
        """


def _code_for(function: FunctionType, *, always: bool) -> CodeType:
    names = function.__code__.co_freevars
    text = _HANDS_OVER.format(closure=", ".join(names), stock="" if always else _IF_STOCK)
    namespace: dict[str, Any] = {}
    exec(compile(text, f"<pyg_accel: {function.__qualname__}>", "exec"), namespace)
    code: CodeType = namespace["with_closure"](*names).__code__.replace(co_name=function.__name__)
    assert code.co_freevars == names
    return code


def _subclasses(cls: type) -> Iterator[type]:
    child: type
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _hand_over_class(cls: type) -> None:
    methods = vars(cls)
    for name, rendered in _RENDERED.items():
        bypass = f"_orig_{name}"
        if rendered not in methods or bypass not in methods:
            continue
        if methods[rendered] is methods[bypass] or methods.get(name) is not methods[rendered]:
            continue  # written by the user
        _hand_over(methods[rendered], _hooks["call"])


def template(module: MessagePassing, name: str) -> Callable[..., Any]:
    """Return the original rendered ``propagate`` or ``edge_updater``."""
    original: Callable[..., Any] = getattr(getattr(module, name), _ORIGINAL)
    return original


def is_rendered(method: Any) -> bool:
    """Return whether a method that PyG sets on instances is a rendered one."""
    return _ORIGINAL in vars(getattr(method, "__func__", method))


# Errors of PyG for classes that it cannot render, and advice.
_ADVICE = {
    "Found inconsistent types": "annotate arguments as PyG does: `index: Tensor, ptr: OptTensor, "
    "size_i: Optional[int], dim_size: Optional[int]`",
    "Could not parse keyword argument": "pass each argument of `self.propagate` as `name=variable`",
    "Cannot compile custom": "write `message`, `aggregate` or `update` instead of `propagate`",
    "could not": "define the class in a file, where its source can be read",
    "source code not available": "define the class in a file, where its source can be read",
}
_not_rendered: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()


def rendering_reason(module: MessagePassing) -> str:
    """Return why PyG rendered no ``propagate`` for a layer, and advice; empty if it did.

    Rendering reads the class of a user, so it may raise anything. PyG drops the exception; here it
    is logged with its traceback, once per class.
    """
    cls: Any = type(module)
    if not _RENDERS or cls._jinja_propagate is not cls._orig_propagate:
        return ""
    if cls not in _not_rendered:
        message = "no reason is known"
        try:
            getattr(module, _RENDERS)(raise_on_error=True)
        except Exception as error:
            _log.info("PyG cannot render %s", cls.__name__, exc_info=True)
            message = str(error).rstrip(".") or type(error).__name__
        advice = [text for start, text in _ADVICE.items() if message.startswith(start)]
        _not_rendered[cls] = "; ".join([f"PyG cannot render this layer: {message}", *advice[:1]])
    return _not_rendered[cls]
