"""Whole training runs: a pure `train(key)`, and a host loop that logs, checkpoints, resumes and plots.

The command line (`_cli`, `_config`) calls the loop (`_run`). The loop calls `_program`, which computes updates from the
step in `_train`, stores results in a folder (`_folder`, `_stored`, `_files`, `_checkpoint`), and reports them
(`_reports`, `_statistics`). Searches (`_search`, `_population`) train many runs. `_processes` handles signals and
ranks, `_evaluate` plays episodes, and `_diagnose`, with `_probe`, explains why a run does not learn.
"""

from ..functional._common import Range as Range
from ._checkpoint import Checkpoints as Checkpoints
from ._cli import exit_on_user_error as exit_on_user_error
from ._cli import main as main
from ._config import Config as Config
from ._config import RunOptions as RunOptions
from ._config import check_config as check_config
from ._diagnose import Finding as Finding
from ._diagnose import diagnose as diagnose
from ._evaluate import EpisodeResults as EpisodeResults
from ._evaluate import evaluate_episodes as evaluate_episodes
from ._files import NonFiniteError as NonFiniteError
from ._files import RunExistsError as RunExistsError
from ._files import RunFolderError as RunFolderError
from ._files import RunNotFoundError as RunNotFoundError
from ._files import read_metrics as read_metrics
from ._files import select_metric as select_metric
from ._folder import LoadedRun as LoadedRun
from ._folder import load as load
from ._population import population as population
from ._probe import probe as probe
from ._program import Program as Program
from ._reports import StopRun as StopRun
from ._run import run as run
from ._search import objective as objective
from ._search import trainable as trainable
from ._statistics import bootstrap as bootstrap
from ._statistics import iqm as iqm
from ._statistics import summary as summary
from ._stored import read_versions as read_versions
from ._stored import recipe as recipe
from ._train import Train as Train
from ._train import TrainResult as TrainResult
from ._train import TrainState as TrainState
from ._train import last_episodes_return as last_episodes_return
from ._train import vmap_over_seeds as vmap_over_seeds
