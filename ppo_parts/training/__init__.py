"""Whole runs: a pure `train(key)`, and the host loop around it that logs, checkpoints, resumes and plots."""

from ._checkpoint import Checkpoints as Checkpoints
from ._errors import NonFiniteError as NonFiniteError
from ._errors import RunExistsError as RunExistsError
from ._errors import RunFolderError as RunFolderError
from ._errors import RunNotFoundError as RunNotFoundError
from ._evaluate import EpisodeResults as EpisodeResults
from ._evaluate import evaluate_episodes as evaluate_episodes
from ._load import LoadedRun as LoadedRun
from ._load import load as load
from ._metrics_file import column as column
from ._metrics_file import read_metrics as read_metrics
from ._options import RunOptions as RunOptions
from ._records import plot_curve as plot_curve
from ._records import versions as versions
from ._records import write_json as write_json
from ._run import main as main
from ._run import run as run
from ._statistics import bootstrap as bootstrap
from ._statistics import iqm as iqm
from ._statistics import summary as summary
from ._train import Train as Train
from ._train import TrainResult as TrainResult
from ._train import TrainState as TrainState
from ._train import check_choices as check_choices
from ._train import last_episodes_return as last_episodes_return
from ._train import updates_in as updates_in
