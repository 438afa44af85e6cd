"""Which backend runs a call, and why the others do not. No kernel runs here."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import pyg_accel
from pyg_accel import BackendNotSupported, Graph, ops, use_backend
from pyg_accel.backends import (
    Backend,
    Kernel,
    OpSpec,
    backends,
    choose,
    get_backend,
    register_backend,
    registry,
    unregister_backend,
)
from pyg_accel.backends.base import table
from pyg_accel.backends.dispatch import prefer_backend
from pyg_accel.backends.notes import record_choices
from pyg_accel.backends.reference import REFERENCE
from pyg_accel.settings import settings


def spec(**changes: Any) -> OpSpec:
    facts = {
        "op": "gspmm", "device": "cpu", "dtype": torch.float32, 
        "num_rows": 10, "num_cols": 10, "num_edges": 50, "heads": 1, "width": 16,
        "formula": "mul(u0,e1)", "reduces": ("sum",),
    }  # fmt: skip
    return OpSpec(**(facts | changes))


def only_sums(spec: OpSpec) -> list[str]:
    return [] if spec.reduces in ((), ("sum",)) else [f"only sums, not {spec.reduces[0]}"]


def custom(cost: float = 0.0, calls: list[Any] | None = None) -> Backend:
    """On a CPU, for sums; free of charge by default."""

    def gspmm(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if calls is not None:
            calls.append(args)
        return REFERENCE.kernels["gspmm"].run(*args, **kwargs)

    runs = {op: kernel.run for op, kernel in REFERENCE.kernels.items() if op != "gspmm_several"}
    return Backend("custom", table(runs | {"gspmm": gspmm}, lambda spec: cost, only_sums))


@pytest.fixture
def cpu() -> Backend:
    backend = get_backend("cpu")
    if reasons := backend.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    return backend


def test_the_cheapest_backend_wins_and_the_other_is_said_to_be_slower(cpu):
    decision = choose(spec())
    assert decision.backend is cpu
    assert decision.rejected["reference"] == ("estimated to be slower than cpu",)


def test_what_the_cpu_kernels_cannot_do_falls_to_the_reference_with_every_reason(cpu):
    big = "+".join(f"u{i}" for i in range(14))
    many = big.split("+")
    formula = many[0]
    for operand in many[1:]:
        formula = f"add({formula},{operand})"
    cases = {
        "tensors are on 'cuda'": spec(device="cuda"),
        "features are torch.complex64": spec(dtype=torch.complex64),
        "a sum over the width inside another": spec(
            formula="sum(sigmoid(mul(u0,sum(mul(u0,v1)))))"
        ),
        "more than 12 operands": spec(formula=formula),
        "more than 6 results": spec(reduces=("sum",) * 7),
    }
    for reason, facts in cases.items():
        decision = choose(facts)
        assert decision.backend.name == "reference"
        assert decision.rejected["cpu"] == (reason,)
        assert f"not cpu: {reason}" in str(decision)


def test_reasons_add_up(cpu):
    decision = choose(spec(device="cuda", dtype=torch.int8))
    assert decision.rejected["cpu"] == ("tensors are on 'cuda'", "features are torch.int8")


def test_a_forced_backend_raises_with_its_reasons_instead_of_falling_back(cpu):
    with use_backend("cpu"), pytest.raises(BackendNotSupported) as caught:
        choose(spec(dtype=torch.int8))
    assert caught.value.reasons == {"cpu": ("features are torch.int8",)}
    assert "gspmm sum mul(u0,e1) on cpu in torch.int8: 10 x 10, 50 edges" in str(caught.value)
    assert "cpu: features are torch.int8" in str(caught.value)


def test_when_nothing_can_run_a_call_all_reasons_are_raised(cpu):
    others = [name for name in backends() if name != "cpu"]
    settings.disable = ", ".join(others)
    with pytest.raises(BackendNotSupported) as caught:
        choose(spec(dtype=torch.int8))
    disabled = dict.fromkeys(others, ("disabled by PYG_ACCEL_DISABLE",))
    assert caught.value.reasons == {**disabled, "cpu": ("features are torch.int8",)}


def test_use_backend_nests_and_ends_with_its_block(cpu):
    with use_backend("reference"):
        assert choose(spec()).backend.name == "reference"
        with use_backend("cpu"):
            assert choose(spec()).backend.name == "cpu"
            with use_backend("auto"):
                assert choose(spec()).backend.name == "cpu"
        assert choose(spec()).backend.name == "reference"
    assert choose(spec()).backend.name == "cpu"
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert choose(spec()).backend.name == "cpu"


def test_use_backend_names_the_backends_that_exist():
    message = "no backend named 'gpu'; there are reference, cpu"
    with pytest.raises(ValueError, match=message), use_backend("gpu"):
        pytest.fail("the block must not run")


def test_the_setting_and_its_variable_force_a_backend_and_the_block_outranks_them(cpu, monkeypatch):
    monkeypatch.setenv("PYG_ACCEL_BACKEND", "reference")
    assert choose(spec()).backend.name == "reference"
    settings.backend = "cpu"
    assert choose(spec()).backend.name == "cpu"
    with use_backend("reference"):
        assert choose(spec()).backend.name == "reference"


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PYG_ACCEL_BACKEND", "gpu")
    with pytest.raises(ValueError, match="no backend named 'gpu'"):
        choose(spec())


@pytest.mark.parametrize("name", ["backend", "disable", "isa"])
def test_unknown_names_in_settings_are_named_with_the_choices(name, cpu, monkeypatch):
    choices = "portable" if name == "isa" else "reference, cpu"
    message = rf"PYG_ACCEL_{name.upper()}\b.*{choices}"
    monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", "Cpu")
    with pytest.raises(ValueError, match=message), pyg_accel.patched():
        pytest.fail("the block must not run")
    monkeypatch.delenv(f"PYG_ACCEL_{name.upper()}")
    setattr(settings, name, "Cpu")
    with pytest.raises(ValueError, match=message):
        choose(spec())


@pytest.mark.parametrize("text", ["cpu", " cpu ", "triton,cpu", "cpu , cuda,"])
def test_disabled_backends_are_not_chosen(text, cpu):
    settings.disable = text
    decision = choose(spec(reduces=("max",)))  # which the optional backends leave to others
    assert decision.backend.name == "reference"
    assert decision.rejected["cpu"] == ("disabled by PYG_ACCEL_DISABLE",)


def test_a_disabled_backend_cannot_be_forced_either(cpu):
    settings.disable = "cpu"
    with use_backend("cpu"), pytest.raises(BackendNotSupported, match="disabled"):
        choose(spec())


def test_a_registered_backend_wins_where_it_is_cheaper_and_runs_the_call():
    calls = []
    register_backend(custom(calls=calls))
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]))
    x = torch.randn(2, 3)
    right = ops.spmm(graph, x)
    assert len(calls) == 1
    with use_backend("reference"):
        torch.testing.assert_close(right, ops.spmm(graph, x))
    ops.spmm(graph, x, reduce="max")
    assert len(calls) == 1
    assert choose(spec(reduces=("max",))).rejected["custom"] == ("only sums, not max",)


@pytest.mark.parametrize("by", ["block", "setting"])
def test_a_gradient_runs_where_it_was_asked_for_and_elsewhere_what_that_backend_lacks(by):
    calls = []
    register_backend(custom(calls=calls))
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]))
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    if by == "setting":
        settings.backend = "custom"
    with use_backend("custom") if by == "block" else nullcontext():
        with record_choices() as names:
            out = ops.spmm(graph, x, weight)
        assert list(names) == ["custom"]
        with pytest.raises(BackendNotSupported, match="only sums, not max"):
            ops.spmm(graph, x, reduce="max")
        with record_choices() as names:
            actual = torch.autograd.grad(out.square().sum(), (x, weight))
    assert len(names) == 2  # a dot for the weights is no sum
    assert len(calls) == 2
    settings.backend = "auto"
    right = torch.autograd.grad(ops.spmm(graph, x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(actual, right)


def test_a_preferred_backend_that_nobody_can_replace_is_missed_with_all_reasons(cpu):
    settings.disable = ",".join(name for name in backends() if name != "cpu")
    with prefer_backend("cpu"), pytest.raises(BackendNotSupported) as caught:
        choose(spec(dtype=torch.int8))
    assert set(caught.value.reasons) == set(backends())


def test_a_registered_backend_loses_where_it_is_dearer(cpu):
    register_backend(custom(cost=1e9))
    decision = choose(spec())
    assert decision.backend is cpu
    assert decision.rejected["custom"] == ("estimated to be slower than cpu",)


def test_decisions_are_made_anew_when_backends_change(cpu):
    assert choose(spec()).backend is cpu
    register_backend(custom())
    assert choose(spec()).backend.name == "custom"
    unregister_backend("custom")
    assert choose(spec()).backend is cpu


def test_a_name_can_be_taken_once_unless_replaced():
    register_backend(custom())
    with pytest.raises(ValueError, match="'custom' exists; pass replace=True"):
        register_backend(custom())
    other = custom()
    register_backend(other, replace=True)
    assert get_backend("custom") is other


def test_only_instances_of_backend_can_be_registered():
    for wrong in (custom, "custom", None):
        with pytest.raises(ValueError, match="expected an instance of Backend"):
            register_backend(wrong)


def test_unregistering_an_unknown_backend_names_those_that_exist():
    with pytest.raises(ValueError, match="no backend named 'custom'; there are"):
        unregister_backend("custom")


CUSTOM = custom()


class EntryPoint:
    def load(self) -> Backend:
        return CUSTOM


def test_packages_add_backends_by_an_entry_point(monkeypatch):
    asked = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint()]

    registry._load_entry_points.cache_clear()
    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert backends()["custom"] is CUSTOM
    backends()
    assert asked == ["pyg_accel.backends"]


def test_the_docstring_names_of_the_package_are_these_objects():
    assert pyg_accel.use_backend is use_backend
    assert pyg_accel.register_backend is register_backend


def test_a_decision_is_logged_once_with_what_was_rejected(cpu, caplog):
    caplog.set_level("DEBUG", logger="pyg_accel")
    for _ in range(3):
        choose(spec(num_edges=51))
    assert [record.getMessage() for record in caplog.records] == [str(choose(spec(num_edges=51)))]


def test_tolerances_are_known_for_every_floating_dtype():
    for backend in backends().values():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            relative, absolute = backend.tolerance(dtype)
            assert 0 < relative < 0.1
            assert 0 < absolute < 0.1


def test_a_backend_that_lacks_an_operator_is_passed_over(cpu):
    half = Backend("half", {"gspmm": Kernel(REFERENCE.kernels["gspmm"].run, lambda spec: 0.0)})
    register_backend(half)
    assert choose(spec()).backend is half
    decision = choose(spec(op="scatter_arg", formula=""))
    assert decision.backend is cpu
    assert decision.rejected["half"] == ("it has no kernel for 'scatter_arg'",)
