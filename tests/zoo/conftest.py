"""Prints what became of each model, as a table in Markdown, after the models of the zoo have run."""

from __future__ import annotations

import pytest

COLUMNS = ("model", "sites", "rewritten", "head", "first and last blocks in bf16", "CPU s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]
    rows = [value for report in reports for key, value in report.user_properties if key == "zoo"]
    if rows:
        terminalreporter.section("zoo")
        terminalreporter.write_line(f"| {' | '.join(COLUMNS)} |")
        terminalreporter.write_line("|" + " --- |" * len(COLUMNS))
        for row in sorted(rows):
            terminalreporter.write_line(row)
