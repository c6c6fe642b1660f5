"""Grading in the host: the rollout's grader, in warm worker processes of the rollout's own environment."""

from harness.grading.pool import GraderPool as GraderPool
from harness.grading.records import GradeRequest as GradeRequest
from harness.grading.records import GradeResult as GradeResult
from harness.grading.records import GraderInfo as GraderInfo
