import os
import shutil
from pathlib import Path

import pytest
import shapes
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shapes and types in the signatures of these modules are checked at every call; this stands before lvpcfg is imported.
install_import_hook(shapes.CHECKED, "shapes.check")

torch.set_num_threads(1)  # many small charts: threads would only wait for each other
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # no test fails because the machine has other work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        if item.get_closest_marker("browser") and not shutil.which("chromium"):
            item.add_marker(pytest.mark.skip(reason="chromium is not installed"))
        if item.get_closest_marker("treebank") and not os.environ.get("LVPCFG_DATA"):
            item.add_marker(pytest.mark.skip(reason="LVPCFG_DATA names no folder of treebanks"))


@pytest.fixture
def data() -> Path:
    return Path(os.environ["LVPCFG_DATA"])
