import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)  # the models are too small for more, and the tests themselves run side by side


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
