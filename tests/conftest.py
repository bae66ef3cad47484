"""What every run of the suite shares.

One fresh Inductor cache a run, shared by its workers: a cache kept from an earlier run could hand out graphs
of earlier code, because on a hit the passes do not run at all. Inside a run sharing is safe (the key holds the
code, the recipe and the decisions) and saves much time.

Hypothesis: with the environment variable CI set, the same examples in every run; otherwise new ones, and
failures are remembered.
"""

import os
import shutil
import tempfile

import hypothesis
import pytest

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist inherit the variable from the process that starts them.
    if not _is_worker(config):
        os.environ[_CACHE_VARIABLE] = tempfile.mkdtemp(prefix="fp4compile-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        shutil.rmtree(os.environ[_CACHE_VARIABLE], ignore_errors=True)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
