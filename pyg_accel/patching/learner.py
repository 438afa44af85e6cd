"""Finding out, from the trace of a call, the plan by which calls of its kind are made again."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.formula import Formula
from pyg_accel.ops.layout import Layout
from pyg_accel.patching.attention import Weights
from pyg_accel.patching.kinds import Key, reads_of, tensors_of
from pyg_accel.patching.lazy import Done, Made
from pyg_accel.patching.plans import (
    THE_LAYER,
    THE_SOFTMAX,
    Origin,
    Plan,
    Softmax,
    keep,
    sizes_of,
)
from pyg_accel.patching.steps import VIEWS, Step, for_any_size, is_index
from pyg_accel.patching.trace import Trace

__all__ = ["learn"]

_CONSTANTS = frozenset({Origin, type(None), bool, int, float})  # arguments of a step


def learn(
    module: MessagePassing, kind: Key | None, kwargs: dict[str, Any], trace: Any, out: Any
) -> None:
    """Keep what a call did, if it can be done again."""
    if kind is not None:
        traced = type(trace) is Trace
        keep(module, kind, lambda: Learner(module, kwargs, trace).plan(out) if traced else None)


class Learner:
    """Finds out where the tensors of a traced call came from."""

    def __init__(self, module: MessagePassing, kwargs: dict[str, Any], trace: Trace) -> None:
        self.module, self.kwargs, self.trace = module, kwargs, trace
        self.made = {id(made.result): made for made in trace.made}
        self._steps: dict[int, Step | None] = {}
        self._whole: dict[int, Origin] = {}  # of the result of a step

    def plan(self, out: Any) -> Plan | None:
        """Return the plan of the call; None if it has none."""
        trace, done, made = self.trace, self.trace.done, self.trace.softmaxed
        if trace.others or trace.edge_index is not trace.owner:
            return None
        gathered: dict[tuple[str, int], None] = {}
        for tensor, row in trace.gathered:
            origin = self._origin(tensor, row)
            if origin is None or origin.steps or origin.place not in (None, 0, 1):
                return None
            gathered[origin.name, row] = None
        softmax = None
        if made is not None:
            softmax = self._softmax(made)
            if softmax is None:
                return None
        written = softmax is not None and softmax.written
        formula: Formula | str | None = None
        reduce: str | tuple[str, ...] = ""
        if done is not None and out is done.result:
            operands = [self._origin(*operand) for operand in done.operands]
            formula, reduce = done.formula, done.reduce
            if reduce != "attention":
                formula = str(formula)
        elif trace.source is not None and out.size(0) == trace.num_edges:
            operands = [self._origin(out, -1)]
        else:
            return None
        assigned = [(name, self._assigned(name)) for name in reads_of(type(self.module)).assigned]
        sizes = sizes_of(tuple(gathered), trace.target, self.kwargs)
        rows = trace.source.graph.num_rows if formula is None and trace.source else out.size(0)
        if (
            None in operands
            or any(origin is None for _, origin in assigned)
            or len(trace.formulas) != 1 + (formula is not None and written)
            or trace.drawn != self._draws()
            or sizes is None
            or sizes[0] != rows
        ):
            return None
        return Plan(
            "; ".join(trace.formulas), trace.target, tuple(gathered), softmax, formula, reduce,
            tuple(operands), tuple(assigned), self._order(softmax, operands),  # type: ignore[arg-type]
        )  # fmt: skip

    def _order(self, softmax: Softmax | None, operands: list[Origin]) -> tuple[Origin, ...]:
        """What is to be made first, so that all is made in the order of the trace."""
        made: list[int] = []  # as operands are taken: arguments of a step come before it

        def take(origin: Origin) -> None:
            for step in origin.steps:
                for given in step[1]:
                    if type(given) is Origin:
                        take(given)
                if id(step) not in made:
                    made.append(id(step))

        for origin in (*(softmax.operands if softmax else ()), *operands):
            take(origin)
        places = {id(self._steps.get(id(m.result))): n for n, m in enumerate(self.trace.made)}
        known = [step for step in made if step in places and step in self._whole]
        order = sorted(known, key=places.__getitem__)
        return () if order == known else tuple(self._whole[step] for step in order)

    def _softmax(self, made: Done) -> Softmax | None:
        operands = [self._origin(*operand) for operand in made.operands]
        source = self.trace.source
        if None in operands or source is None:
            return None
        trailing = tuple(source.shape[1:])
        folded = [t.shape[1:] for t, _, _ in made.operands] != [
            t.shape[1:] for t in source.operands
        ]
        layout = Layout(trailing, len(trailing)) if folded else None
        return Softmax(source.score, tuple(operands), layout, source.dtype, trailing,  # type: ignore[arg-type]
                       not isinstance(made.result, Weights))  # fmt: skip

    def _assigned(self, name: str) -> Origin | None:
        value = vars(self.module).get(name)
        return self._origin(value, -1) if isinstance(value, Tensor) else None

    def _origin(self, tensor: Tensor, row: int, repeated: bool = False) -> Origin | None:
        """Where a tensor comes from. Of a pair, PyG gathers the one whose place is the row."""
        if isinstance(tensor, Weights):
            return self._of_weights(tensor)
        steps: list[Step] = []
        while id(tensor) in self.made:
            step = self._made_by(self.made[id(tensor)])
            if step is None:
                return None
            steps.insert(0, step)
            tensor = self.made[id(tensor)].args[0]
        found: list[tuple[str, int | str | None]] = [
            (name, row if type(value) is tuple else None)
            for name, value in self.kwargs.items()
            if value is tensor or (type(value) is tuple and row >= 0 and value[row] is tensor)
        ]
        found += [
            (path, THE_LAYER)
            for name in reads_of(type(self.module)).attributes
            for path, value in tensors_of(name, getattr(self.module, name, None))
            if value is tensor
        ]
        softmaxed = self.trace.softmaxed
        if softmaxed is not None and softmaxed.result is tensor:
            found.append(("", THE_SOFTMAX))
        if len(found) != 1:  # one tensor may be several arguments
            return None
        for n, step in enumerate(steps, 1):
            self._whole[id(step)] = Origin(*found[0], tuple(steps[:n]), row, repeated)
        return Origin(*found[0], tuple(steps), row, repeated)

    def _made_by(self, made: Made) -> Step | None:
        """The step that makes an ordinary tensor of its first argument; None if none can."""
        key = id(made.result)
        if key not in self._steps:
            self._steps[key] = self._repeatable(made)
        return self._steps[key]

    def _repeatable(self, made: Made) -> Step | None:
        function, given, kwargs = made.function, made.args[1:], made.kwargs
        if function is None or not made.args or not isinstance(made.args[0], Tensor):
            return None
        if function in VIEWS:
            return for_any_size((function, given, kwargs), -1)
        if function is Tensor.__getitem__:
            return (function, given, {}) if is_index(*given) else None
        args = [self._origin(a, -1) if isinstance(a, Tensor) else a for a in given]
        for now, then in zip(args, given, strict=True):
            if type(now) not in _CONSTANTS or (now is None and then is not None):
                return None
        known = made.result.dim() and all(type(v) in _CONSTANTS for v in kwargs.values())
        return (function, tuple(args), kwargs) if known else None

    def _of_weights(self, weights: Weights) -> Origin | None:
        """Where attention weights come from: this call, or an argument that another call made."""
        origins = [
            (name, None, value) for name, value in self.kwargs.items() if isinstance(value, Weights)
        ]
        softmaxed = self.trace.softmaxed
        if softmaxed is not None and isinstance(softmaxed.result, Weights):
            origins.append(("", THE_SOFTMAX, softmaxed.result))  # type: ignore[arg-type]
        for name, place, first in origins:
            count = len(first.made)
            if first.source is weights.source and weights.made[:count] == first.made:
                steps = [self._step(step) for step in weights.made[count:]]
                if None not in steps:
                    return Origin(name, place, tuple(steps), -1, repeated=False)  # type: ignore[arg-type]
        return None

    def _draws(self) -> int:
        """How many masks the plan draws; more than one might come in another order."""
        drawn = sum(
            step is not None and step[0].__name__ == "dropout" for step in self._steps.values()
        )
        return drawn if drawn <= 1 else -1

    def _step(self, step: Step) -> Step | None:
        """The step for any number of edges; steps that tensors share stay one."""
        if id(step) not in self._steps:
            self._steps[id(step)] = for_any_size(step, self.trace.num_edges)
        return self._steps[id(step)]
