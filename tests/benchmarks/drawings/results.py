"""Result files, as the figures need them."""

import report


def rows_of(name: str) -> dict[str, dict[str, float]]:
    """Return the medians of a result file's rows that finished, by label."""
    rows = report.content(report.REPOSITORY / report.result(name))["rows"]
    return {row["label"]: medians(row) for row in rows if report.measured_runs(row)}


def medians(row: dict) -> dict[str, float]:
    """Return the median over the runs of each number of a row."""
    runs = report.measured_runs(row)
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return {key: report.median(run[key] for run in runs if key in run) for key in numbers}
