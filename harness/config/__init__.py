"""What users write: eval and training configs, data sets, secrets, ``[tool.harness]``."""

from harness.config.dataset import Selection as Selection
from harness.config.dataset import dataset_digest as dataset_digest
from harness.config.dataset import resolve_dataset as resolve_dataset
from harness.config.dataset import select_rows as select_rows
from harness.config.eval import EvalConfig as EvalConfig
from harness.config.eval import Evaluation as Evaluation
from harness.config.eval import load_eval_config as load_eval_config
from harness.config.experiment import Experiment as Experiment
from harness.config.secrets import Redactor as Redactor
from harness.config.secrets import ambient_secrets as ambient_secrets
from harness.config.secrets import resolve_secrets as resolve_secrets
from harness.config.settings import ArtifactSettings as ArtifactSettings
from harness.config.settings import GraderSettings as GraderSettings
from harness.config.settings import RolloutSettings as RolloutSettings
from harness.config.settings import load_settings as load_settings
from harness.config.training import TrainingConfig as TrainingConfig
from harness.config.training import load_training_config as load_training_config
from harness.config.workspace import Workspace as Workspace
