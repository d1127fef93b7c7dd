"""Programs and runs that all tests of runs share."""

import shutil
from pathlib import Path

import pytest

from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._processes import print_messages
from tests.runs import EVALUATED, UPDATES, Crash, acting, crash, go, tiny


@pytest.fixture(autouse=True)
def messages():
    """Print what runs log, as command lines do."""
    with print_messages():
        yield


@pytest.fixture(scope="package")
def train():
    return cleanrl_ppo.make_train(tiny())


@pytest.fixture(scope="package")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def make_train(train):
    """Make the recipe's `Train`, whose programs are compiled already."""

    def make_train(config: cleanrl_ppo.Config):
        assert config == tiny(UPDATES)
        return train

    return make_train


@pytest.fixture(scope="package")
def whole(train, place):
    """Run without interruption."""
    return go(train, place, "whole", eval_episodes=3, tensorboard=True)


@pytest.fixture(scope="package")
def evaluated(train, place):
    """Run with an evaluation after updates 5, 10 and 12, and keep every checkpoint."""
    return go(train, place, "evaluated", **EVALUATED, tensorboard=True)


@pytest.fixture(scope="package")
def crashed(train, place):
    """Return a run that died in update 11, with checkpoints 4 and 8; copy it before you change it."""
    with pytest.raises(Crash):
        go(train, place, "crashed", program=acting(12, crash))
    return place / "crashed"


@pytest.fixture
def broken(crashed, tmp_path):
    return Path(shutil.copytree(crashed, tmp_path / "broken"))
