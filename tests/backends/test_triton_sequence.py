"""What the CUDA library is told of sequences of launches, without one, and copies of rows."""

from types import SimpleNamespace

import pytest
import torch

from tests.backends.interpreted import INTERPRETED

pytestmark = INTERPRETED


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 700])
def test_narrow_rows_are_taken_in_any_order(heads, rows):
    from pyg_accel.backends.triton import gather
    from pyg_accel.backends.triton.sequence import Sequence

    x = torch.randn(max(rows, 1), 2 * heads, 1)[:, :heads]  # rows apart from one another
    order = torch.randint(max(rows, 1), (rows,), dtype=torch.int32)
    sequence = Sequence(1, x.device)
    out = sequence.result((rows, heads, 1), x.dtype)
    kernel, given = gather.gather_of(heads), sequence.operands[0]
    gather.append_to(sequence, kernel, given, x.stride(0), order, out, heads)
    torch.testing.assert_close(sequence([x])[0], x[order.long()], rtol=0, atol=0)


class TestSequence:
    """What the CUDA library is told of launches, without one."""

    @pytest.fixture
    def told(self, monkeypatch):
        from pyg_accel.backends.triton import sequence

        told: list[object] = []
        library = SimpleNamespace(
            add_sequence=lambda arrays, code: told.append((arrays, code)) or self.number,
            remove_sequence=lambda number: None,
            run_sequence=lambda number, operands, sizes: [number, *operands, *sizes],
        )
        monkeypatch.setattr(sequence, "cuda_library", lambda: library)
        monkeypatch.setattr(sequence, "cuda_unavailable_reasons", lambda: [])
        monkeypatch.setattr(sequence, "direct", lambda function: function)
        return told

    number = 5

    def _sequence(self, compiled: object, *numbers: int):
        from pyg_accel.backends.triton.sequence import Kernel, Sequence

        kernel, made = Kernel(None, 4), Sequence(1, torch.device("cuda", 3))
        kernel.compiled = compiled
        out, between = (made.result((2, 3), torch.bfloat16), made.scratch((7,), torch.int64))
        self.array = torch.zeros(4)
        made.launch(kernel, (8, 2), (self.array, None, made.operands[0], out, between, *numbers))
        return made

    compiled = SimpleNamespace(function=99, metadata=SimpleNamespace(shared=64))

    def test_it_is_written_down_as_numbers(self, told):
        assert self._sequence(self.compiled, 6, 7)([torch.ones(1)]) == [5, torch.ones(1)]
        ((arrays, code),) = told
        assert arrays == [self.array]
        # One result; two tensors, of dtypes 15 and 4, not of zeros, of numbers as sizes.
        new = [1, 2, 15, 0, 2, 0, 2, 0, 3, 4, 0, 1, 0, 7]
        grid = [-1, 8, 1, -1, 2, 1, -1, 1, 1]
        arguments = [1, 0, 2, 0, 2, 1, 2, 2, 0, 6, 0, 7]
        assert code == [3, 1, *new, 1, 99, *grid, 128, 64, 6, *arguments]

    def test_what_differs_between_graphs_is_told_in_each_call(self, told):
        from pyg_accel.backends.triton.sequence import Blocks, Kernel, Sequence, Size

        kernel, made = Kernel(None, 4), Sequence(1, torch.device("cuda", 3))
        kernel.compiled = self.compiled
        out = made.result((Size(1), 3), torch.float32, zero=True)
        made.launch(kernel, (Blocks(0, 2, 64), 1), (made.operands[0], out, Size(1)))
        assert made([torch.ones(1)], (100, 4)) == [5, torch.ones(1), 100, 4]
        ((_, code),) = told
        assert code == [3, 1, 1, 1, 6, 1, 2, 1, 1, 0, 3, 1, 99, 0, 2, 64, -1, 1, 1, -1, 1, 1,
                        128, 64, 3, 2, 0, 2, 1, 3, 1]  # fmt: skip

    def test_python_launches_what_is_not_compiled(self, told):
        assert self._sequence(None)._written() is None
        assert told == []

    def test_python_launches_what_the_library_refuses(self, told, monkeypatch):
        monkeypatch.setattr(self.__class__, "number", 0)
        refused = self._sequence(self.compiled)
        assert refused._written() is None
        assert not refused._usual

    @pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
    def test_python_launches_with_long_numbers(self, told, number):
        assert not self._sequence(self.compiled, number)._usual
