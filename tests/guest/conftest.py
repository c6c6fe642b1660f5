from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk import environment_0_2


@pytest.fixture(scope="session")
def python_0_2(pytestconfig: pytest.Config) -> Path:
    return environment_0_2(Path(pytestconfig.cache.mkdir("sdk-0.2.31")))
