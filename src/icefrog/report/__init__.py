"""Reports: metrics, tables, plots and one HTML page, folded from the event log alone."""

from icefrog.report.html import write_report
from icefrog.report.load import LoadedRuns, load_dir, report_dir
from icefrog.report.metrics import summarise
from icefrog.report.record import JobRecord, RunRecord, fold
from icefrog.report.tables import summary_document, write_jobs_csv, write_summary
from icefrog.report.terminal import render_comparison, render_table

__all__ = [
    "JobRecord",
    "LoadedRuns",
    "RunRecord",
    "fold",
    "load_dir",
    "render_comparison",
    "render_table",
    "report_dir",
    "summarise",
    "summary_document",
    "write_jobs_csv",
    "write_report",
    "write_summary",
]
