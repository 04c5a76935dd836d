import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        if item.get_closest_marker("treebank") and not os.environ.get("LVPCFG_DATA"):
            item.add_marker(pytest.mark.skip(reason="LVPCFG_DATA names no folder of treebanks"))


@pytest.fixture
def data() -> Path:
    return Path(os.environ["LVPCFG_DATA"])
