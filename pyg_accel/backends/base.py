"""The type of backends: a name and a table of kernels."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import DTYPES, Tolerance
from pyg_accel.backends.spec import OpSpec
from pyg_accel.costs import RATES, SLOWEST
from pyg_accel.formula import Formula, Operand, parse
from pyg_accel.graph import CSR
from pyg_accel.settings import settings

__all__ = [
    "Backend", "Kernel", "Launch", "atomics_allowed", "by_launch", "placement_reasons", "table",
    "weighted_sum", "winners_are_columns",
]  # fmt: skip


class Launch(NamedTuple):
    """A kernel on a graph: ``function(*before, *operands)`` computes its results.

    Results are contiguous, a list or a tensor. Results with one column may lack the last dimension.

    Attributes:
        function: of tensors.
        before: its arguments before the operands.
        listed: it takes the operands as a list.
        accepts_any_layout: operands may have any strides, and any shape behind their
            rows, which results of a reduction have as well.
    """

    function: Callable[..., Any]
    before: tuple[Any, ...] = ()
    listed: bool = False
    accepts_any_layout: bool = False

    def bound(self) -> Callable[..., Any]:
        """Return it as a function of the operands, or of their list."""
        return partial(self.function, *self.before)

    def __call__(self, operands: list[Tensor]) -> list[Tensor]:
        """Compute [rows, H, F]."""
        outs = self.function(*self.before, *([operands] if self.listed else operands))
        return [t if t.dim() == 3 else t.unsqueeze(-1) for t in
                ((outs,) if type(outs) is Tensor else outs)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function that computes an operator, and facts for the choice among kernels.

    Reasons and costs must depend on the facts of the call alone, because they are cached.

    Attributes:
        run: computes the operator, with the arguments and results of its function in
            :mod:`pyg_accel.backends.reference`.
        cost: the expected time of a call in seconds; only the order of kernels matters. The default
            follows from :data:`pyg_accel.costs.RATES`.
        reasons: why a call cannot be run; empty if it can.
        bind: of ``gspmm``, ``gspmm_several``, ``attention`` and its gradient: takes the arguments
            of ``run``, and returns a function that maps a graph to the :class:`Launch` of similar
            calls: graphs of one :class:`~pyg_accel.graph.facts.Kind`, and operands that differ only
            in addresses and numbers of rows. For kernels whose choice of a launch takes longer than
            the launch. ``attention_backward`` takes
            :attr:`.attention.AttentionGradient.tensors`. ``scatter_arg`` takes a gradient and the
            number of columns, and returns the :class:`Launch`.
        prefers_unfused: True if the unfused operators were faster.
    """

    run: Callable[..., Any]
    cost: Callable[[OpSpec], float] | None = None
    reasons: Callable[[OpSpec], list[str]] = lambda spec: []
    bind: Callable[..., Any] | None = None
    prefers_unfused: Callable[[OpSpec], bool] = lambda spec: False

    def bound(
        self, csr: CSR, before: tuple[Any, ...], operands: list[Tensor], *after: Any, **options: Any
    ) -> Callable[[CSR], Launch]:
        """Return a function that maps graphs of a kind to the launch of ``run``."""
        if self.bind is not None:
            launch: Callable[[CSR], Launch] = self.bind(csr, *before, operands, *after, **options)
            return launch
        run = self.run
        return lambda csr: Launch(lambda t: run(csr, *before, t, *after, **options), listed=True)


def by_launch(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a single call, whose last argument are the operands."""
    return lambda csr, *args: bind(csr, *args)(csr).bound()(args[-1])


def table(
    runs: Mapping[str, Callable[..., Any]],
    cost: Callable[[OpSpec], float] | None = None,
    reasons: Callable[[OpSpec], list[str]] = lambda spec: [],
) -> dict[str, Kernel]:
    """Return the kernels of functions by operator that share their cost and their reasons."""
    return {op: Kernel(run, cost, reasons) for op, run in runs.items()}


@dataclass(eq=False, repr=False)
class Backend:
    """Kernels for some device, by operator.

    A backend sees arrays, never models. Dispatch passes it over for operators that it lacks.

    Attributes:
        name: for users.
        kernels: by operator of :mod:`pyg_accel.backends.reference`.
        unavailable_reasons: why none of them can be used on this machine; empty if they can.
        tolerance: how far a result may be from the truth: relative to the sum of magnitudes, and
            absolute.
        info: facts about the build for ``python -m pyg_accel doctor``.
    """

    name: str
    kernels: dict[str, Kernel]
    unavailable_reasons: Callable[[], list[str]] = list
    tolerance: Callable[[torch.dtype], Tolerance] = lambda dtype: DTYPES[dtype].tolerance
    info: Callable[[], dict[str, Any]] = dict

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """Return why an available backend cannot run this call."""
        kernel = self.kernels.get(spec.op)
        return [f"it has no kernel for '{spec.op}'"] if kernel is None else kernel.reasons(spec)

    def cost(self, spec: OpSpec) -> float:
        """Return the expected seconds of a call that is supported."""
        if (cost := self.kernels[spec.op].cost) is not None:
            return cost(spec)
        rates = RATES.get((self.name, spec.device), SLOWEST)
        return rates.seconds(spec.num_edges, spec.heads * spec.width * spec.dtype.itemsize)


def placement_reasons(
    spec: OpSpec, device: str, dtypes: Container[torch.dtype] = DTYPES.keys()
) -> list[str]:
    """Return why tensors on their device, of their dtype, are not for kernels of another."""
    reasons = [] if spec.device == device else [f"tensors are on '{spec.device}'"]
    return reasons if spec.dtype in dtypes else [*reasons, f"features are {spec.dtype}"]


def weighted_sum(
    gspmm: Callable[..., list[Tensor]], csr: CSR, x: Tensor, weight: Tensor | None, reduce: str
) -> Tensor:
    """Reduce the rows of x [num_cols, F], weighted by [E] as ``csr.eid`` numbers edges.

    Args:
        gspmm: the kernel.
        csr: the graph.
        x: features of the sources.
        weight: of the edges; None for 1.
        reduce: ``sum`` or ``mean``.
    """
    operands = [x.unsqueeze(1)] + ([] if weight is None else [weight.view(-1, 1, 1)])
    formula = parse("u0" if weight is None else "mul(u0,e1)")
    return gspmm(csr, formula, operands, [reduce], want_arg=False)[0].squeeze(1)


def atomics_allowed() -> bool:
    """Whether a kernel may add floats atomically, so that its sums differ between runs."""
    return bool(settings.atomics) and not torch.are_deterministic_algorithms_enabled()


def winners_are_columns(formula: Formula, reduces: Sequence[str]) -> bool:
    """Whether winners are numbered by their source: a lone maximum (minimum) of source features.

    Its gradient is then a scatter of N x F elements that needs no edges.
    """
    return isinstance(formula, Operand) and formula.side == "u" and len(reduces) == 1
