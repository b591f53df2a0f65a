"""Task files, the JSON definitions behind "EFA vs TCP" (S0): read, written, run.

>>> from kvik_lab.tasks import export_tasks, import_plan, read_task_file
>>> file = read_task_file("p14-efa-1k.json")          # StudyError: all mistakes with line, column and remedy
>>> file.tasks[0].commands                            # as written; file.expand(text) puts the variables in
>>> export_tasks(study, "task-definitions")           # a file for each pattern and role
>>> import_plan(["task-definitions"])                 # which variables vary, which are constant
"""

from kvik_lab.tasks.exporting import export_tasks
from kvik_lab.tasks.form import Task, TaskFile, parse_task_file, read_task_file, write_task_file
from kvik_lab.tasks.importing import ImportedPlan, import_plan
from kvik_lab.tasks.runner import Outcome, RunOptions, run_task_file, stop_task_file

__all__ = [
    "ImportedPlan", "Outcome", "RunOptions", "Task", "TaskFile", "export_tasks", "import_plan",
    "parse_task_file", "read_task_file", "run_task_file", "stop_task_file", "write_task_file",
]  # fmt: skip
