from trainer_node.masks import MaskTally


def tally(**fields):
    return MaskTally(**{"share_limit": 0.25, "window": 20, "min_samples": 8, **fields})


def mask(made, count=1, **fields):
    for _ in range(count):
        made.add_masked(
            **{"cause": "INTERNAL", "tool": "calculator", "task_id": "a", "kind": "one", "reason": "gone", **fields}
        )


def score(made, count, kind="one"):
    for _ in range(count):
        made.add_scored(kind)


def test_share_and_report():
    made = tally()
    score(made, 6)
    mask(made, 2, kind="two", task_id="b")
    mask(made, tool="", cause="reward_error")
    assert made.share == 3 / 9
    report = made.report()
    assert report["by_cause"] == {"INTERNAL": 2, "reward_error": 1}
    assert report["by_tool"] == {"calculator": 2, "none": 1}
    assert report["share_by_kind"] == {"one": 1 / 7, "two": 1.0}
    assert report["prompts"] == {"b": 2, "a": 1}
    assert tally().share == 0


def test_it_stops_only_above_the_limit_and_only_with_enough_samples():
    made = tally()
    mask(made, 7)
    assert made.too_many() is None
    mask(made)
    sentence = made.too_many()
    assert "100% of the last 8 samples were masked, the limit is 25%" in sentence
    assert "INTERNAL 8" in sentence
    assert "calculator 8" in sentence
    assert "gone" in sentence
    exactly = tally()
    score(exactly, 6)
    mask(exactly, 2)
    assert exactly.too_many() is None


def test_the_window_forgets():
    made = tally()
    mask(made, 10)
    score(made, 20)
    assert made.too_many() is None
    assert made.masked == 10
    mask(made, 6)
    assert made.too_many() is not None


def test_prompts_are_bounded(monkeypatch):
    monkeypatch.setattr("trainer_node.masks.MAX_PROMPTS", 3)
    made = tally()
    for number in range(10):
        mask(made, task_id=str(number))
    assert len(made.by_prompt) == 3
    assert made.masked == 10
