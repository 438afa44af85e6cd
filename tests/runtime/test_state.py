"""The state of the running call: one object, with the values of each thread."""

import threading

import pytest

from pyg_accel.runtime.state import CallState, during, running


def test_a_thread_starts_with_the_defaults():
    seen = []
    with during(stock=True, lent=[]):
        thread = threading.Thread(target=lambda: seen.append((running.stock, running.lent)))
        thread.start()
        thread.join()
        assert running.stock
    assert seen == [(False, None)]


def test_a_block_restores_what_it_sets_after_an_error_too():
    with pytest.raises(KeyError), during(static=(1,)):
        with during(static=(2,), products=[]):
            assert running.static == (2,)
        assert running.static == (1,)
        assert running.products is None
        raise KeyError
    assert running.static == ()


def test_a_block_sets_no_unknown_attribute():
    with pytest.raises(AttributeError), during(stok=True):
        pass


def test_every_attribute_is_documented():
    names = [name for name in vars(CallState) if not name.startswith("_") and name != "wire"]
    assert CallState.__doc__ is not None
    assert [name for name in names if f"        {name}: " not in CallState.__doc__] == []
