"""For all tests: examples have no deadline of their own, as a busy machine may stop any of them for a while."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("fermata", deadline=None)
hypothesis.settings.load_profile("fermata")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The NVML that plays back recordings, compiled once; see tests/support/nvml."""
    from tests.support.nvml import build

    return build(tmp_path_factory.mktemp("nvml"))
