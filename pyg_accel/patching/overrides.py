"""The one file that knows how PyG is built inside.

PyG renders a ``propagate`` for every subclass of MessagePassing when the first instance of it is
made, so replacing ``MessagePassing.propagate`` reaches nothing. What is replaced here, recorded,
and put back by :func:`uninstall`:

* ``propagate`` and ``edge_updater`` of every class that has a rendered one, and
  ``MessagePassing._set_jittable_templates``, which renders them for classes still to come.
* ``MessagePassing._collect``, which only the reference ``propagate`` calls: explainers and feature
  decomposition run that one instead. It only takes a note.
* ``MessagePassing._call_impl``, by which torch runs the forward of a layer and its hooks: only
  inside of it results are remembered.
* ``Aggregation.__call__``, where messages meet their reduction.
* functions that derive an edge_index from another at every call (``gcn_norm``, self-loops, masks),
  wherever ``torch_geometric.nn``, ``torch_geometric.utils`` and ``torch_sparse`` hold them: see
  :mod:`pyg_accel.memo`.
* ``softmax`` over target nodes, ``spmm``, and ``set_sparse_value``, which takes no lazy tensors.
* ``scatter`` and ``segment``, by which readouts reduce rows over groups, and ``to_dense_batch``.
* ``QuantileAggregation.forward`` and ``SortAggregation.forward``, which sort.
* ``RGCNConv.forward`` and ``HeteroConv.forward``, which loop over relations.
* ``torch.nn.Embedding.forward``, for its gradient on a CPU.
* torch's look-up of the overloads of a function that is being scripted, so that TorchScript knows
  the functions above by their originals: what it compiles is kept under them, and outlives us.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.nn import Embedding
from torch_geometric.nn import HeteroConv, MessagePassing, RGCNConv
from torch_geometric.nn.aggr import Aggregation, QuantileAggregation, SortAggregation

from pyg_accel.patching.layer_call import LOOKS_UP, SMALL, layer_call

__all__ = [
    "HOOK_DICTS", "Hooks", "hook_reasons", "install", "installed", "is_hooked", "uninstall",
]  # fmt: skip

_MISSING = object()
_ORIGINAL = "__original_fn"  # torch.jit.script_if_tracing's name for what a wrapper stands for
_RENDERED = {"propagate": "_jinja_propagate", "edge_updater": "_jinja_edge_updater"}
_MEMOISED = (
    "gcn_norm",
    "add_self_loops",
    "remove_self_loops",
    "add_remaining_self_loops",
    "get_laplacian",
    "masked_edge_index",  # RGCNConv: the edges of one relation
    "construct_bipartite_edge_index",  # HGTConv: the edges of all of them
    "set_diag",  # of torch_sparse
    "fill_diag",
)
_HOLDERS = ("torch_geometric.nn", "torch_geometric.utils", "torch_sparse")
_HOMES = ("torch_geometric.", "torch_sparse.")
HOOK_DICTS = (
    "_propagate_forward_pre_hooks", "_propagate_forward_hooks",
    "_message_forward_pre_hooks", "_message_forward_hooks",
    "_aggregate_forward_pre_hooks", "_aggregate_forward_hooks",
    "_message_and_aggregate_forward_pre_hooks", "_message_and_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks", "_edge_update_forward_hooks",
)  # fmt: skip
# What stands in for a method: the name of the hook, and the `unless` of its wrapper.
_METHODS: tuple[tuple[type, str, str, int | None], ...] = (
    (MessagePassing, "_collect", "bypassed", None),
    (Aggregation, "__call__", "aggregate", LOOKS_UP),
    (QuantileAggregation, "forward", "quantile", None),
    (SortAggregation, "forward", "sort", None),
    (RGCNConv, "forward", "relations", LOOKS_UP),
    (HeteroConv, "forward", "hetero", None),
    (Embedding, "forward", "embedding", LOOKS_UP),
)
_FUNCTIONS = ("softmax", "spmm", "set_sparse_value", "scatter", "segment", "to_dense_batch")

# What the accelerated side provides, by name. Every function gets the original first, but `layer`
# and `remember`, which become methods.
Hooks = Mapping[str, Callable[..., Any]]

_lock = threading.RLock()
_recorded: list[tuple[Any, str, Any]] = []


def installed() -> bool:
    """Return whether anything of PyG is replaced at the moment."""
    return bool(_recorded)


def install(hooks: Hooks) -> None:
    """Replace what the docstring of this module lists; does nothing the second time.

    Args:
        hooks: all of those that :mod:`pyg_accel.patching.api` lists.
    """
    with _lock:
        if _recorded:
            return
        _wrap_classes(hooks)
        render = MessagePassing._set_jittable_templates

        @functools.wraps(render)
        def rendered(self: MessagePassing, raise_on_error: bool = False) -> None:
            render(self, raise_on_error)
            with _lock:
                if _recorded:
                    _wrap_class(type(self), hooks)

        _replace(MessagePassing, "_set_jittable_templates", rendered)
        _replace(MessagePassing, "_call_impl", hooks["layer"])  # no wrapper: all calls go through
        for cls, name, hook, unless in _METHODS:
            _replace(cls, name, _wrapped(getattr(cls, name), hooks[hook], unless=unless))
        _replace(MessagePassing, hooks["remember"].__name__, hooks["remember"])
        _replace_functions(hooks)
        find: Callable[[Any], Any] = torch.jit._script._get_overloads
        _replace(torch.jit._script, "_get_overloads", lambda f: find(getattr(f, _ORIGINAL, f)))


def uninstall() -> None:
    """Put everything back as it was."""
    with _lock:
        while _recorded:
            owner, name, original = _recorded.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replace(owner: Any, name: str, value: Any) -> None:
    _recorded.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def _wrapped(
    original: Callable[..., Any], hook: Callable[..., Any], *, unless: int | None = LOOKS_UP
) -> Callable[..., Any]:
    """A function that hands the original and its arguments to a hook.

    Inside of a layer's call that is known to be as small as ``unless`` it runs the original.

    It keeps ``__module__``, by which PyG recognises its own templates. TorchScript reads the
    original's source through it and looks names up in the wrapper's globals: they are those of the
    original. Dynamo, which counts recompilations by code, finds code of its own.
    """
    compiles, call = torch.compiler.is_dynamo_compiling, layer_call  # no globals: see above
    if unless is not None:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not compiles() and call.small >= unless:
                return original(*args, **kwargs)
            return hook(original, *args, **kwargs)
    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

    names = getattr(original, "__globals__", globals())
    code = wrapper.__code__.replace(co_name=original.__name__)
    built = FunctionType(code, names, "wrapper", None, wrapper.__closure__)
    functools.update_wrapper(built, original)
    # What torch.jit.script_if_tracing leaves: scripting and compiling see the original.
    vars(built).update(
        {"_pyg_accel": True, "__script_if_tracing_wrapper": True, _ORIGINAL: original}
    )
    return built


def _unread(function: Any) -> Any:
    """Return a function at which Dynamo begins no graph after a break; in a graph it reads it."""
    skip_code(function.__code__)
    return function


def _subclasses(cls: type) -> Iterator[type]:
    child: type
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _wrap_classes(hooks: Hooks) -> None:
    for cls in dict.fromkeys(_subclasses(MessagePassing)):
        _wrap_class(cls, hooks)


def _wrap_class(cls: type, hooks: Hooks) -> None:
    own = vars(cls)
    for name, rendered in _RENDERED.items():
        bypass = f"_orig_{name}"
        if rendered not in own or bypass not in own or hasattr(own[rendered], "_pyg_accel"):
            continue
        template: Callable[..., Any] = own[rendered]
        # A class that was rendered while its parent was wrapped has our wrapper as its original.
        setattr(cls, bypass, getattr(own[bypass], _ORIGINAL, own[bypass]))
        if template is own[bypass] or own.get(name) is not template:
            continue  # written by the user: not ours to change
        wrapper = _wrapped(template, hooks["call"])
        _replace(cls, name, wrapper)
        _replace(cls, rendered, wrapper)


def _replace_functions(hooks: Hooks) -> None:
    functions = dict.fromkeys(_MEMOISED, hooks["memoise"])
    functions |= {name: hooks[name] for name in _FUNCTIONS}
    wrappers: dict[Any, Any] = {}
    users = {cls.__module__ for cls in _subclasses(MessagePassing)}  # import softmax by name
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_HOLDERS) and module_name not in users:
            continue
        for name, hook in functions.items():
            original = vars(module).get(name)
            if not isinstance(original, FunctionType) or not original.__module__.startswith(_HOMES):
                continue
            if original not in wrappers:
                # A small call on a known graph too gets from memory what was derived from it.
                wrapper = _wrapped(original, hook, unless=SMALL if name in _MEMOISED else LOOKS_UP)
                wrappers[original] = _unread(wrapper)
            if original not in wrappers.values():
                _replace(module, name, wrappers[original])


def template(module: MessagePassing, name: str) -> Callable[..., Any]:
    """Return the rendered ``propagate`` or ``edge_updater`` that our wrapper stands for."""
    wrapper = getattr(module, name)
    found: Callable[..., Any] = getattr(wrapper, _ORIGINAL)
    return found


def is_hooked(module: MessagePassing) -> bool:
    """Return whether :func:`hook_reasons` has any; it is asked in every call."""
    own = vars(module)
    for name in HOOK_DICTS:
        if own[name]:
            return True
    return bool(own["_explain"]) or own["_decomposed_layers"] > 1


def hook_reasons(module: MessagePassing) -> list[str]:
    """Return why PyG's own path must be taken, whatever the message is."""
    reasons = [
        f"a {name.strip('_').removesuffix('s').replace('_', ' ')}"
        for name in HOOK_DICTS
        if getattr(module, name, None)
    ]
    if module.explain:
        reasons.append("an explainer is active")
    if module.decomposed_layers > 1:
        reasons.append("decomposed_layers > 1")
    return reasons
