"""The fixtures and the tiers of the package's tests, for those of the benchmarks."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

spec = spec_from_file_location("tests_conftest", Path(__file__).parents[2] / "tests/conftest.py")
assert spec is not None and spec.loader is not None
module = module_from_spec(spec)
spec.loader.exec_module(module)
globals().update({name: value for name, value in vars(module).items() if name[0] != "_"})
