"""Progress while a run is going, and what people look at afterwards."""

from harness.report.progress import Reporter as Reporter
from harness.report.progress import make_reporter as make_reporter
from harness.report.summary import show_plan as show_plan
from harness.report.summary import show_results as show_results
from harness.report.terminal import printable as printable
