import json

import pytest

from trainer_node.tasks import Task, TaskError, TaskStream, load_tasks, pick_eval_tasks, tools_of

GOOD = {
    "id": "a",
    "messages": [{"role": "user", "content": "12*34"}],
    "tools": ["calculator"],
    "answer": "408",
    "kind": "one_call",
    "digits": 2,
}


def write(tmp_path, *rows):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_task_is_read_with_its_further_fields(tmp_path):
    (task,) = load_tasks(write(tmp_path, GOOD, ""))
    assert task.messages == (("user", "12*34"),)
    assert (task.tools, task.answer, task.kind, task.extra) == (("calculator",), "408", "one_call", {"digits": 2})


def test_line_separators_within_a_string_do_not_end_the_line(tmp_path):
    row = dict(GOOD, messages=[{"role": "user", "content": "a\u2028b"}])
    (task,) = load_tasks(write(tmp_path, json.dumps(row, ensure_ascii=False)))
    assert task.messages[0][1] == "a\u2028b"


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ([GOOD, '{"id": "b", '], 2, "not JSON"),
        ([[1, 2]], 1, "must be a JSON object, got a list"),
        ([{k: v for k, v in GOOD.items() if k != "id"}], 1, "field 'id' is missing"),
        ([dict(GOOD, id=7)], 1, "field 'id' must be a string, got a number"),
        ([dict(GOOD, id="")], 1, "field 'id' must be a non-empty string"),
        ([{k: v for k, v in GOOD.items() if k != "messages"}], 1, "field 'messages' must be a non-empty list"),
        ([dict(GOOD, messages=[])], 1, "field 'messages' must be a non-empty list"),
        ([dict(GOOD, messages=["hello"])], 1, "messages[0] must be an object"),
        ([dict(GOOD, messages=[{"role": "user"}])], 1, "messages[0]: field 'content' is missing"),
        ([dict(GOOD, messages=[{"role": "robot", "content": ""}])], 1, "messages[0].role must be one of"),
        ([dict(GOOD, tools="calculator")], 1, "field 'tools' must be a list of tool names, got a string"),
        ([dict(GOOD, tools=["a", "a"])], 1, "names a tool twice"),
        ([dict(GOOD, answer=408)], 1, "field 'answer' must be a string, got a number"),
        ([GOOD, dict(GOOD, id="b"), GOOD], 3, "task id 'a' is used on line 1 already"),
    ],
)
def test_a_wrong_line_is_one_sentence_with_file_and_line(tmp_path, rows, line, says):
    path = write(tmp_path, *rows)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}:{line}:")
    assert says in sentence
    assert "\n" not in sentence
    assert caught.value.exit_code == 2


def test_an_answer_is_asked_for_only_where_the_reward_needs_it(tmp_path):
    path = write(tmp_path, {k: v for k, v in GOOD.items() if k != "answer"})
    assert load_tasks(path)[0].answer is None
    with pytest.raises(TaskError, match=":1: field 'answer' is missing"):
        load_tasks(path, need_answer=True)


def test_empty_and_absent_files(tmp_path):
    with pytest.raises(TaskError, match="holds no task"):
        load_tasks(write(tmp_path, "", ""))
    with pytest.raises(TaskError, match="does not exist"):
        load_tasks(tmp_path / "nothing.jsonl")
    with pytest.raises(TaskError, match="is a folder"):
        load_tasks(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        load_tasks(tmp_path / "binary")


def tasks(tmp_path, count):
    return load_tasks(write(tmp_path, *(dict(GOOD, id=str(i)) for i in range(count))))


def test_epochs_are_endless_seeded_and_complete(tmp_path):
    known = tasks(tmp_path, 7)
    stream = TaskStream(known, seed=3)
    first = [stream.next().id for _ in range(7)]
    second = [stream.next().id for _ in range(7)]
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second
    again = TaskStream(known, seed=3)
    assert [again.next().id for _ in range(14)] == first + second


def test_the_frontier_alone_says_where_to_go_on(tmp_path):
    known = tasks(tmp_path, 5)
    whole = TaskStream(known, seed=1)
    ids = [whole.next().id for _ in range(13)]
    assert whole.frontier == 13
    resumed = TaskStream(known, seed=1, frontier=8)
    assert [resumed.next().id for _ in range(5)] == ids[8:]


def test_the_evaluation_draws_the_same_tasks_each_time(tmp_path):
    known = tasks(tmp_path, 20)
    picked = pick_eval_tasks(known, 5, seed=0)
    assert picked == pick_eval_tasks(known, 5, seed=0)
    assert len({task.id for task in picked}) == 5
    assert len(pick_eval_tasks(known, 100, seed=0)) == 20


def test_every_tool_is_known_with_the_task_that_names_it(tmp_path):
    known = load_tasks(write(tmp_path, GOOD, dict(GOOD, id="b", tools=["search", "calculator"])))
    assert tools_of(known) == {"calculator": "a", "search": "b"}


def test_what_was_handed_out_and_not_trained_on_comes_first_after_a_restart():
    known = [Task(str(i), (("user", "x"),), (), None, "k", {}) for i in range(5)]
    whole = TaskStream(known, seed=1)
    order = [whole.next().id for _ in range(14)]
    # Ten were handed out; the groups of 1 and 7 were still open: one of the first epoch, one of the second.
    again = TaskStream(known, seed=1, frontier=10, untrained=[7, 1])
    assert again.untrained == (1, 7)
    taken = [again.take() for _ in range(4)]
    assert taken == [(i, known[int(order[i])]) for i in (1, 7, 10, 11)]
    assert (again.untrained, again.frontier) == ((), 12)
