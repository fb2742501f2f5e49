"""Safety reports as tables on the console, several side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.console import table_console


def print_reports(reports: Mapping[str, Mapping[str, Any]], *, by_task: bool = False) -> None:
    """Print reports of :func:`components.safety.report.safety_report`.

    One row per check: the rollouts that violate it over those to which it applied, the rate with
    its 95 % interval; for S5 occasions too. Of two reports also the difference of the rates.

    Args:
        reports: by label.
        by_task: also a row for each task with a violation.
    """
    console = table_console()
    if any(report["tasks"] for report in reports.values()):
        console.print(_checks_table(reports))
    for label, report in reports.items():
        if report["num_skipped"]:
            console.print(f"{label}: {report['num_skipped']} failed rollouts were left out")
        if report["unchecked"]:
            console.print(f"{label}: no checks for domain {', '.join(report['unchecked'])}")
        if by_task:
            _print_tasks(console, label, report)


def _checks_table(reports: Mapping[str, Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="safety: rollouts that violate a check", show_edge=False, pad_edge=False)
    table.add_column("check")
    table.add_column("rule")
    for label, report in reports.items():
        table.add_column(f"{label} (n={report['num_rollouts']})", justify="right")
    both = list(reports.values()) if len(reports) == 2 else []
    if both:
        table.add_column("difference", justify="right")
    names = list(next(iter(reports.values()))["checks"])
    for name in names:
        entries = [report["checks"][name] for report in reports.values()]
        soft = "" if entries[0]["hard"] else " (soft)"
        row = [name, entries[0]["title"] + soft, *(_cell(name, entry) for entry in entries)]
        table.add_row(*row, *([_difference(*entries)] if both else []))
    entries = [report["any_hard"] for report in reports.values()]
    row = ["any", "any hard check", *(_cell("any", entry) for entry in entries)]
    table.add_row(*row, *([_difference(*entries)] if both else []))
    return table


def _cell(name: str, entry: Mapping[str, Any]) -> str:
    if entry["rate"] is None:
        return "-"
    text = (
        f"{entry['violated']}/{entry['applied']}  {entry['rate']:.2f} "
        f"\\[{entry['low']:.2f}, {entry['high']:.2f}]"
    )
    if name == "S5":  # a rate of statements more than of rollouts
        text += f"  of statements {entry['broken']}/{entry['occasions']}"
    return text


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    if first["rate"] is None or second["rate"] is None:
        return "-"
    return f"{second['rate'] - first['rate']:+.2f}"


def _print_tasks(console: Any, label: str, report: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{label}: by task", show_edge=False, pad_edge=False)
    for column in ("task", "rollouts", "violated / applied"):
        table.add_column(column, justify="right" if column == "rollouts" else "left")
    for task_id, task in report["tasks"].items():
        if task["violated"]:
            cells = [f"{n} {k}/{task['applied'][n]}" for n, k in task["violated"].items()]
            table.add_row(escape(task_id), str(task["rollouts"]), "  ".join(cells))
    if table.row_count:
        console.print(table)
    else:
        console.print(f"{label}: no task has a violation")
