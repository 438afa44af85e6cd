"""Runs the calls of a layer in the fastest order of its products."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import record_choices
from pyg_accel.cache import Bounded, TensorRef
from pyg_accel.call_report import record
from pyg_accel.patching.gate import too_small
from pyg_accel.patching.reasons import data_reasons, is_active, row_bytes
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.patching.sampling import state as sampled
from pyg_accel.patching.size import HOOK, Work
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.consensus import SharedDecisions, spread_reasons
from pyg_accel.rewrite.guards import PLAIN, reasons_now, state_of
from pyg_accel.rewrite.halos import HALO_LOOKUPS
from pyg_accel.rewrite.lift import is_user_layer, lift, named, parameters_of
from pyg_accel.rewrite.lower import Program
from pyg_accel.rewrite.override import RUNNING
from pyg_accel.rewrite.select import Decision, Options, make_decision, sort_of, widths_of
from pyg_accel.rewrite.user_layers import UserLayerRun, lift_user_layer

__all__ = ["RewrittenLayer"]

MOST = 16  # decisions a layer keeps, and kinds of calls that a user layer may fail at
KINDS = 64  # of calls that it knows
_WORK = Work(overhead=HOOK)  # of a call of a layer that a user wrote, beside its products
RECENT = 8  # graphs that a layer knows again
OUTSIDE = (
    "a layer rewritten by pyg_accel.optimize() whose values torch.compile cannot read, or whose "
    "arguments are of another kind than any that it was called with outside of the compiler"
)


class RewrittenLayer(torch.nn.Module):
    """What :class:`~pyg_accel.rewrite.optimized.OptimizedModel` runs in place of a layer.

    A call that cannot be lifted is made by the layer itself. It is a module, so that a compiler
    takes numbers that it holds for constants, but a part of no model.

    Attributes:
        conv: the layer.
        options: of ``optimize()``.
        decisions: what was decided so far, the latest last.
        reasons: why calls were left to the layer.
    """

    def __init__(self, conv: MessagePassing, options: Options) -> None:
        """Start without decisions."""
        super().__init__()
        self.conv = conv
        self.options = options
        self.decisions: list[Decision] = []
        self.reasons: dict[str, int] = {}
        self._algebras: Bounded[Any, tuple[Algebra, dict[str, int]] | str] = Bounded(KINDS)
        self._left: dict[Any, str] = {}  # calls of user layers that PyG makes, and why
        self._compiled: dict[str, Program] = {}
        self._numbers: dict[str, list[float]] = {}
        self._arguments = parameters_of(type(conv))  # type: ignore[arg-type]
        plain = [n for n, v in vars(conv).items() if v is None or type(v) in PLAIN]
        self._options = [name for name in plain if name != "training"]
        self._recent: deque[TensorRef] = deque(maxlen=RECENT)
        self._spread = SharedDecisions()
        self._dtypes: dict[tuple[torch.dtype, ...], torch.dtype] = {}
        self._unseen = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        if torch.compiler._is_exporting_flag or torch.jit.is_tracing():
            return self.conv(*args, **kwargs)  # an export is to run without this package
        if not torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        given = named(self._arguments, args, kwargs)
        kind = self._sort(given)
        who = self._who(kind, sampled.key)
        # A compiler may take numbers of the layer for symbols, which are compared and not written.
        if who == "program" and self._floats() != self._numbers[kind]:
            who = "layer"
        if who == "program":
            return self._compiled[kind].run(Call(self.conv, given))
        return self.conv(*args, **kwargs) if who == "layer" else self._outside(*args, **kwargs)

    @torch.compiler.disable(reason=OUTSIDE)  # type: ignore[untyped-decorator]
    def _outside(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer where a compiler does not look: the graph breaks here."""
        return self._run(*args, **kwargs)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _who(self, kind: str, sampled: str) -> str:
        """Return who runs compiled calls of a kind: a ``"program"``, the ``"layer"``, or neither.

        They have no sizes of their own, so the latest decision serves. It is made anew on what was
        learned of its graph, since compiled code keeps nothing from one call to the next.
        """
        if HALO_LOOKUPS:  # rows of other processes are exchanged where a compiler does not look
            return ""
        if sampled or reasons_now(self.conv) or not self.decisions:
            return "layer"
        for known in reversed(self.decisions):
            if (
                known.kind == (kind, self._floats())
                and known.algebra.compiles
                and known.sampling is None
            ):
                self._compiled[kind] = known.afresh(self.options.choose)
                self._numbers[kind] = self._floats()
                return "program"
        return ""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        with record_choices() as backends:
            out, trees, reason = self._outcome(args, kwargs)
        name, seconds = type(self.conv).__name__, time.perf_counter() - start
        if trees:
            record(name, "; ".join(trees), "+".join(backends) or "torch", "", seconds)
        elif not is_active(self.conv):  # else patch() has counted the call
            record(name, "", "PyG", reason, seconds)
        return out

    def _outcome(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, None], str]:
        """Return what a call returns, the trees that ran, and why the layer itself made it."""
        trees: dict[str, None] = {}
        left = ""

        def run(call: Call) -> Any:
            decision = self.decision(call)
            trees[str(decision.choice.tree)] = None
            return decision.program.run(call)

        try:
            call = Call(self.conv, named(self._arguments, args, kwargs))
            call.static = call.is_one_of(RUNNING.static)
            own = is_user_layer(type(self.conv))
            reasons = data_reasons(call.edge_index) if own else []
            if call.halos is not None:
                reasons += spread_reasons(own=own, precisions=len(_precision(call)))
            if own and self.options.choose is None:
                size = row_bytes({"x": call.x}, self.conv.node_dim)
                edges = call.edge_index.size(1)
                reasons += too_small(self.conv, call.edge_index, edges, _WORK, size, known=True)
            if reasons := reasons or reasons_now(self.conv):
                raise NotLifted("; ".join(reasons))
            if own:
                out, left = self._user_layer(call, run, args, kwargs)
            else:
                out = self._cast(run(call), call)
        except NotLifted as reason:  # a rule may find out when it looks at values
            left = str(reason)
            trees.clear()
            self.reasons[left] = self.reasons.get(left, 0) + 1
            out = self.conv(*args, **kwargs)
        return out, trees, left

    def _user_layer(
        self,
        call: Call,
        product: Callable[[Call], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, str]:
        """Run the code of a layer that a user wrote, with its products in the fastest order.

        Returns:
            What it returns, and why some of it was left to PyG.
        """
        modes = (self.conv.training, torch.is_grad_enabled(),
                 torch.is_autocast_enabled(call.x.device.type))  # fmt: skip
        kinds = modes, state_of(self.conv), *map(_kind, call.given.values())
        if len(self._left) >= MOST:
            raise NotLifted(next(reversed(self._left.values())))
        if kinds in self._left:
            raise NotLifted(self._left[kinds])
        run = UserLayerRun(call, product)
        out = run(args, kwargs)
        if run.left:
            self._left[kinds] = run.left
        for reason in {**run.reasons, run.left: None} if run.left else run.reasons:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return out, run.left

    def decision(self, call: Call) -> Decision:
        """Return what to do with a call: what was decided before, if it holds.

        Raises:
            NotLifted: if the layer has to do it itself.
        """
        if call.halos is not None:
            return self._spread(call, self._kind(call), self.options, self._algebra, self.decisions)
        fresh = self._is_fresh(call.edge_index)
        algebra, widths = self._algebra(call)
        sampling = in_force() if algebra.sampled else None
        if sampling is not None:
            refuse_training(self.conv)
            widths = widths | {"S": sampling.width}
        sizes = {"N": call.num_rows, "M": call.num_cols, **widths}
        entries = call.edge_index.size(1)
        for known in reversed(self.decisions):
            same = known.algebra is algebra and (known.fresh, known.sampling) == (fresh, sampling)
            if same and known.holds(sizes, entries):
                return known
        kind = self._sort(call.given), self._floats()
        decision = make_decision(algebra, call, self.options, sizes=sizes, fresh=fresh,
                                 sampling=sampling, kind=kind)  # fmt: skip
        self.decisions = [*self.decisions[1 - MOST :], decision]
        return decision

    def _cast(self, out: Any, call: Call) -> Any:
        """Return what the program computed in the precision that the layer computes it in."""
        if not isinstance(out, Tensor):
            return out
        kind = _precision(call)
        if len(set(kind)) == 1:
            return out
        if kind not in self._dtypes:
            self._dtypes[kind] = dtype_of(self.conv, call)
        return out.to(self._dtypes[kind])

    def _algebra(self, call: Call) -> tuple[Algebra, dict[str, int]]:
        """What a call computes, and how wide it is: the same for all calls of a kind.

        An option that changed, or a module in another's place, makes calls of another kind.
        """
        record = call.memo.get("record")
        kinds = (record.form, call.static, call.x.requires_grad) if record else self._kind(call)
        found = self._algebras.get(kinds)
        if found is None:
            try:
                algebra = lift_user_layer(self.conv, call) if record else lift(self.conv, call)
                found = algebra, widths_of(algebra, call)
            except NotLifted as reason:
                found = str(reason)
            self._algebras[kinds] = found
        if isinstance(found, str):
            raise NotLifted(found)
        return found

    def _kind(self, call: Call) -> tuple[Any, ...]:
        return call.static, state_of(self.conv), *map(_kind, call.given.values())

    def _sort(self, given: Mapping[str, Any]) -> str:
        """Return what compiled calls know of arguments and options, and may not differ in."""
        options = [getattr(self.conv, name) for name in self._options]
        return " ".join(
            [sort_of(value) for value in (*given.values(), *options) if type(value) is not float]
        )

    def _floats(self) -> list[float]:
        """Return the options that are numbers with a fraction."""
        return [v for v in [getattr(self.conv, n) for n in self._options] if isinstance(v, float)]

    def _is_fresh(self, edge_index: Tensor) -> bool:
        """Whether graphs come and go, as batches do: two in a row that were never seen before."""
        if any(ref.fits(edge_index) for ref in tuple(self._recent)):
            self._unseen = 0
        else:
            self._recent.append(TensorRef(edge_index))
            self._unseen += 1
        return self._unseen > 2


def _kind(value: Any) -> Any:
    """What of an argument a rule may look at."""
    if isinstance(value, Tensor):
        width = value.size(-1) if value.dim() > 1 and value.is_floating_point() else 0
        return type(value), value.dtype, value.dim(), width, value.requires_grad, value.device.type
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value)


def _precision(call: Call) -> tuple[torch.dtype, ...]:
    """The precisions that meet in a call: PyG's order of products says which one comes out."""
    given = (t for value in call.given.values()
             for t in (value if isinstance(value, (tuple, list)) else (value,)))  # fmt: skip
    found = [t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point()]
    found += [p.dtype for p in call.conv.parameters() if p.is_floating_point()]
    if torch.is_autocast_enabled(call.x.device.type):
        found.append(torch.get_autocast_dtype(call.x.device.type))
    return tuple(dict.fromkeys(found))


def dtype_of(conv: MessagePassing, call: Call) -> torch.dtype:
    """Return the precision that a layer computes in, by a call of it on one node.

    Raises:
        NotLifted: if it cannot be called so.
    """
    entries = call.edge_index.size(1)

    def first(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(first(name, v) for v in value)
        if value is call.edge_index:
            return value[:, :1] * 0
        if isinstance(value, Tensor) and value.dim():
            edges_too = name.startswith("edge") or value.size(0) == entries
            return value[: min(1, entries) if edges_too else 1].detach()
        return (1, 1) if name == "size" and value is not None else value

    modes = [(module, module.training) for module in conv.modules()]
    cached = {name: v for name, v in vars(conv).items() if name.startswith("_cached")}
    conv.eval()
    try:
        with torch.no_grad():
            out = conv(**{name: first(name, value) for name, value in call.given.items()})
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise NotLifted(f"several precisions: {error}") from None
    finally:
        vars(conv).update(cached)
        for module, mode in modes:
            module.training = mode
    if not isinstance(out, Tensor):
        raise NotLifted("several precisions")
    return out.dtype
