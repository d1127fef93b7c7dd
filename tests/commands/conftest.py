"""The run that the tests of commands look at."""

from pathlib import Path

import pytest

from ppo_parts import training
from tests import recipe


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a run with two seeds."""
    config, place = recipe.Config(), tmp_path_factory.mktemp("runs")
    options = training.RunOptions(name="two", directory=place, num_seeds=2, tensorboard=False, progress=False)
    training.run(recipe.make_train(config), config, options)
    return place / "two"
