"""The run directory: journal, results, transcripts, artifacts; in the layout that the platform's upload accepts."""

from harness.store.artifacts import ArtifactLimits as ArtifactLimits
from harness.store.artifacts import ArtifactReport as ArtifactReport
from harness.store.artifacts import receive_artifacts as receive_artifacts
from harness.store.journal import Entry as Entry
from harness.store.logs import CallLog as CallLog
from harness.store.logs import TextLog as TextLog
from harness.store.manifest import DatasetInputs as DatasetInputs
from harness.store.manifest import Retry as Retry
from harness.store.manifest import RolloutInputs as RolloutInputs
from harness.store.manifest import RunInfo as RunInfo
from harness.store.manifest import RunInputs as RunInputs
from harness.store.manifest import Timeouts as Timeouts
from harness.store.names import check_name as check_name
from harness.store.names import generate_name as generate_name
from harness.store.run import DEFAULT_OUTPUT as DEFAULT_OUTPUT
from harness.store.run import RunResult as RunResult
from harness.store.run import RunStore as RunStore
