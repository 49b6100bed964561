"""Tasks from JSONL, and the order in which they are taken.

Owns the data frontier: how many tasks were handed out, and which of them still have to be trained on after a restart.
Invariant: the same file, seed and frontier give the same next task.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_runtime.errors import EXIT_USAGE, NodeError

ROLES = ("system", "user", "assistant", "tool")


class TaskError(NodeError):
    """A task file that cannot be used; the sentence names file and line."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EXIT_USAGE)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the model is asked, which tools it may call, and what is right."""

    id: str
    messages: tuple[tuple[str, str], ...]  # (role, content)
    tools: tuple[str, ...]
    answer: str | None
    kind: str
    extra: dict[str, Any]  # further fields of the line, for rewards of the user's own


def load_tasks(path: Path, *, need_answer: bool = False) -> list[Task]:
    """Read every task of a JSONL file. Raises TaskError with one sentence for the first line that is wrong.

    `need_answer`: the reward compares with the field 'answer', so a task without one is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"task file {path} does not exist: give the path of a JSONL file of tasks") from None
    except IsADirectoryError:
        raise TaskError(f"task file {path} is a folder: give the path of a JSONL file of tasks") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task file {path} cannot be read ({error}): it must be a readable UTF-8 file") from None
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    # Not splitlines(): a task may hold U+2028, which is no end of line in JSONL.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        task = _parse_line(line, f"{path}:{number}")
        if need_answer and task.answer is None:
            raise TaskError(f"{path}:{number}: field 'answer' is missing: the reward exact_answer needs it as a string")
        if task.id in seen:
            raise TaskError(
                f"{path}:{number}: task id {task.id!r} is used on line {seen[task.id]} already: ids are unique"
            )
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise TaskError(f"task file {path} holds no task: it needs at least one JSON object, one per line")
    return tasks


def _parse_line(line: str, where: str) -> Task:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON ({error}): each line is one JSON object") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a task must be a JSON object, got {_kind(row)}")
    task_id = _text(row, "id", where, required=True)
    if not task_id:
        raise TaskError(f"{where}: field 'id' must be a non-empty string")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TaskError(
            f"{where}: field 'messages' must be a non-empty list of {{role, content}}, got {_kind(messages)}"
        )
    parsed = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TaskError(f"{where}: messages[{index}] must be an object with role and content, got {_kind(message)}")
        role = _text(message, "role", f"{where}: messages[{index}]", required=True)
        if role not in ROLES:
            raise TaskError(f"{where}: messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r}")
        parsed.append((role, _text(message, "content", f"{where}: messages[{index}]", required=True) or ""))
    tools = row.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, str) and tool for tool in tools):
        raise TaskError(f"{where}: field 'tools' must be a list of tool names, got {_kind(tools)}")
    if len(set(tools)) != len(tools):
        raise TaskError(f"{where}: field 'tools' names a tool twice: {', '.join(tools)}")
    known = {"id", "messages", "tools", "answer", "kind"}
    return Task(
        id=task_id,
        messages=tuple(parsed),
        tools=tuple(tools),
        answer=_text(row, "answer", where),
        kind=_text(row, "kind", where) or "task",
        extra={key: value for key, value in row.items() if key not in known},
    )


def _text(row: dict[str, Any], field: str, where: str, *, required: bool = False) -> str | None:
    if field not in row and required:
        raise TaskError(f"{where}: field '{field}' is missing: it must be a string")
    value = row.get(field)
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise TaskError(f"{where}: field '{field}' must be a string, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    names = {type(None): "nothing", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


class TaskStream:
    """Endless seeded epochs over a list of tasks. `frontier` counts tasks handed out; a run may begin at any.

    `untrained`: positions before the frontier that a run before this one handed out and never trained on; they come
    first. Groups end in any order, so the frontier alone cannot say which they were.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, frontier: int = 0, untrained: Sequence[int] = ()) -> None:
        if not tasks:
            raise ValueError("a task stream needs at least one task")
        self._tasks = list(tasks)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self._untrained = deque(sorted(untrained))
        self.frontier = frontier

    @property
    def untrained(self) -> tuple[int, ...]:
        """What is left of them."""
        return tuple(self._untrained)

    def next(self) -> Task:
        """The next task, at the frontier (which moves on by one) or before it."""
        return self.take()[1]

    def take(self) -> tuple[int, Task]:
        """As `next`, with the task's position."""
        if self._untrained:
            position = self._untrained.popleft()
        else:
            position = self.frontier
            self.frontier += 1
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return position, self._tasks[self._order[index]]


def pick_eval_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` tasks drawn once with a seed (all of them where there are fewer), always the same for the same seed."""
    picked = list(tasks)
    random.Random(f"{seed}/eval").shuffle(picked)
    return picked[:count]


def tools_of(tasks: Sequence[Task]) -> dict[str, str]:
    """Every tool that tasks name → id of the first task that does."""
    named: dict[str, str] = {}
    for task in tasks:
        for tool in task.tools:
            named.setdefault(tool, task.id)
    return named
