"""The command line: help, settings, cases, exit codes; each failure is one sentence."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fermata_cli.cluster import prometheus_files
from fermata_cli.cluster.certificates import Authority
from fermata_cli.cluster.plan import Role
from fermata_cli.commands.demo_settings import DemoOptions, DemoSettings
from fermata_cli.main import main
from fermata_cli.runtime import find_gateway
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings

CASES = Path(__file__).parents[2] / "cases"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FERMATA_")]:
        monkeypatch.delenv(name)


def test_help_costs_no_heavy_import() -> None:
    code = (
        "import sys; from fermata_cli.main import main; main(['--help']); "
        "heavy = {'torch', 'vllm', 'transformers', 'grpc', 'matplotlib', 'numpy', 'pydantic', 'rich.live'}; "
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Commands:" in shown.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dmo"], "No such command 'dmo'"),
        (
            ["demo", "--rollout-nodes", "7"],
            "Invalid value for '--rollout-nodes': it must be less than or equal to 2: see",
        ),
        (["demo", "--steps", "x"], "Invalid value for '--steps': it must be an integer: see --help"),
        (["tools", "call", "calculator", "{'a': 1}"], "the arguments are no JSON"),
        (["tools", "list", "--gateway", "nowhere"], "nowhere"),
        (["config", "show", "--set", "gatway.port=1"], "unknown section 'gatway': did you mean 'gateway'?"),
        (["config", "show", "--set", "trainer.learning_rat=1"], "did you mean 'learning_rate'?"),
        (["config", "show", "--set", "cluster.rollout_node=1"], "did you mean 'rollout_nodes'?"),
        (["config", "show", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["turn", "check", "--tools", "/nowhere.json", str(CASES / "turns.jsonl")], "/nowhere.json cannot be read"),
        (["timeline", "/nowhere"], "/nowhere is no folder"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert "Traceback" not in shown.err


def test_config_show_resolves_file_variables_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fermata.yaml"
    file.write_text("gateway: {port: 7100}\nrollout: {model: /m, port: 1}\n")
    monkeypatch.setenv("FERMATA_ROLLOUT__PORT", "2")
    assert main(["config", "show", "--config", str(file), "--set", "gateway.drain_s=3"]) == 0
    shown = capsys.readouterr()
    tree = yaml.safe_load(shown.out)
    assert tree["gateway"]["port"] == 7100
    assert tree["gateway"]["drain_s"] == 3
    assert tree["rollout"]["port"] == 2
    assert tree["cluster"]["rollout_nodes"] == 1
    assert "trainer: left out" in shown.err
    again = tmp_path / "again.yaml"
    again.write_text(shown.out)
    monkeypatch.delenv("FERMATA_ROLLOUT__PORT")
    assert main(["config", "show", "--config", str(again)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == tree


def test_config_show_says_what_is_missing_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fermata.yaml"
    file.write_text("trainer: {steps: 3}\n")
    assert main(["config", "show", "--config", str(file)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "trainer" in line] == [
        f"fermata: {file}:1: trainer.{key} is missing: set it in the file or with --set trainer.{key}=..."
        for key in ("model", "train_tasks", "rollout_nodes")
    ]
    flags = ["trainer.model=/m", "trainer.train_tasks=/t", 'trainer.rollout_nodes=["h:1"]']
    assert main(["config", "show", "--config", str(file), *(w for f in flags for w in ("--set", f))]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["run_dir"] == "runs/train"


def test_config_show_needs_no_engine() -> None:
    code = (
        "import sys; from fermata_cli.main import main; code = main(['config', 'show']); "
        "sys.exit(code or ','.join({'torch', 'vllm', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_turn_check_passes_and_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools, cases = str(CASES / "tools.json"), str(CASES / "turns.jsonl")
    assert main(["turn", "check", "--tools", tools, cases]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "all as expected" in shown.err
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(
        json.dumps(
            {"id": "mine", "completion": "no call here", "finish": "stop", "calls": [{"tool": "x", "args": "{}"}]}
        )
    )
    assert main(["turn", "check", "--tools", tools, str(wrong)]) == 1
    assert "MISS mine" in capsys.readouterr().err
    assert main(["turn", "check", "--tools", tools, "--json", str(wrong)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["missed"] == 1
    assert report["results"][0]["misses"] == ["expected 1 calls, got 0"]
    wrong.write_text("\n")
    assert main(["turn", "check", "--tools", tools, str(wrong)]) == 2
    assert f"{wrong} holds no case" in capsys.readouterr().err
    wrong.write_text("{\n")
    assert main(["turn", "check", "--tools", tools, str(wrong)]) == 2
    assert f"{wrong}:1 is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "code", "sentence"),
    [
        (["trainer.learnin_rate=1"], 2, "did you mean 'learning_rate'?"),
        (["rollout.model=/nowhere"], 2, "rollout.model: /nowhere is no folder: give a Hugging Face model folder"),
        (["trainer.model=/nowhere"], 2, "trainer.model: /nowhere is no folder"),
        (["trainer.train_tasks=/nowhere.jsonl"], 2, "task file /nowhere.jsonl does not exist"),
        (["trainer.steps=two"], 2, "trainer.steps must be an integer"),
    ],
)
def test_a_demo_that_cannot_be_is_refused_before_anything_starts(
    overrides: list[str], code: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for override in overrides for word in ("--set", override)]
    assert main(["demo", "--runs", str(tmp_path), *flags]) == code
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--set", "trainer.lerning=1"],
        ["--config", "nothere.yaml"],
        ["--set", "trainer.train_tasks=/nowhere.jsonl"],
        ["--set", "trainer.model=/nowhere"],
        ["--set", "trainer.model=RUN/model"],
        ["--steps", "x"],
    ],
)
def test_a_demo_that_is_refused_leaves_the_last_run_as_it_is(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "demo"
    (run / "model").mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    (run / "model" / "config.json").write_text("{}")
    before = sorted(run.rglob("*"))
    assert main(["demo", "--runs", str(tmp_path), *(flag.replace("RUN", str(run)) for flag in flags)]) == 2
    assert sorted(run.rglob("*")) == before
    assert "Traceback" not in capsys.readouterr().err


def test_a_broken_task_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tmp_path / "tasks.jsonl"
    good = {"id": "a", "messages": [{"role": "user", "content": "?"}], "tools": [], "answer": "1"}
    tasks.write_text(json.dumps(good) + "\n{broken\n")
    assert main(["demo", "--runs", str(tmp_path), "--set", f"trainer.train_tasks={tasks}"]) == 2
    assert f"{tasks}:2" in capsys.readouterr().err


def test_the_file_of_a_run_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DemoOptions(seed=5, steps=3, slow_share=0.5, slow_seconds=(1.0, 2.0), overrides=("trainer.steps=4",))
    file = tmp_path / "fermata.yaml"
    DemoSettings(options, tmp_path / "run").write(file)
    assert main(["config", "show", "--config", str(file)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["seed"] == shown["rollout"]["engine"]["seed"] == 5
    assert shown["trainer"]["steps"] == 4  # --set comes last
    assert shown["backend"]["delay"] == {"share": 0.5, "seconds": [1.0, 2.0]}
    assert shown["trainer"]["model"] == shown["rollout"]["model"]
    assert shown["trainer"]["run_dir"] == str(tmp_path / "run")


def test_a_model_and_tasks_of_ones_own_take_the_place_of_the_demos(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    task = {"id": "a", "messages": [{"role": "user", "content": "?"}], "tools": ["search"], "answer": "1"}
    tasks.write_text("\n" + json.dumps(task) + "\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = DemoSettings(
        DemoOptions(overrides=(f"rollout.model={model}", f"trainer.train_tasks={tasks}")), tmp_path / "run"
    )
    assert settings.trainer.model == model
    assert settings.trainer.eval_tasks is None
    assert settings.always_offered == {"search"}
    assert settings.tool_places == {"search": f"{tasks}:2"}


def test_tls_makes_an_identity_that_the_file_names(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = DemoSettings(DemoOptions(tls=True), run_dir)
    assert settings.identity is not None
    settings.identity.write()
    tls, tokens = settings.runtime.tls, settings.runtime.tokens
    assert tls.require_client_cert
    assert tokens.accept_file == tokens.send_file
    shown = [tls.ca_file, tls.cert_file, tls.key_file, tokens.send_file]
    flags = [override for overrides in settings.identity.overrides.values() for override in overrides]
    shown += [Path(json.loads(flag.partition("=")[2])) for flag in flags]
    assert all(path is not None and path.is_absolute() and path.is_file() for path in shown)
    assert len(set(shown)) == 4 + 2 * len(Role)  # nobody shares a key


@pytest.mark.parametrize("given", ["runtime.tls.ca_file=mine.pem", "runtime.tokens.send_file=token"])
def test_tls_of_the_demo_or_ones_own(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tls", "--runs", str(tmp_path), "--set", given]) == 2
    section = ".".join(given.split(".")[:2])
    told = f"certificates and a token of its own, and {section} is set too (--set {given.partition('=')[0]})"
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_prometheus_is_told(tmp_path: Path) -> None:
    prometheus_files.write_config(tmp_path, RuntimeSettings(metrics_port=0))
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["scheme"] == "http"
    targets = tmp_path / scrape["file_sd_configs"][0]["files"][0]
    assert json.loads(targets.read_text()) == []
    prometheus_files.write_targets(tmp_path, [(Role.GATEWAY, "gateway", "127.0.0.1:1")])
    assert json.loads(targets.read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"job": "fermata-gateway", "node": "gateway"}}
    ]
    pem = Authority(tmp_path).issue("gateway")
    tls = TlsSettings(ca_file=tmp_path / "ca.pem", cert_file=pem.cert, key_file=pem.key)
    prometheus_files.write_config(tmp_path, RuntimeSettings(metrics_port=0, metrics_tls=True, tls=tls))
    (scrape,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert (scrape["scheme"], scrape["tls_config"]) == ("https", {"ca_file": str(tmp_path / "ca.pem")})


def test_the_file_of_a_run_that_is_up_leads_to_its_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, file = DemoSettings(DemoOptions(), tmp_path / "run"), tmp_path / "fermata.yaml"
    settings.write(file)
    assert find_gateway(file, ()) == "127.0.0.1:7000"
    settings.write(file, gateway="127.0.0.1:4321")
    assert find_gateway(file, ()) == "127.0.0.1:4321"
    assert find_gateway(file, ('rollout.gateway=["127.0.0.1:1"]',)) == "127.0.0.1:1"
    monkeypatch.setenv("FERMATA_CONFIG", str(file))
    assert find_gateway(None, ()) == "127.0.0.1:4321"
    assert main(["config", "show", "--config", str(file)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["fermata.yaml"]


def test_without_the_engine_the_demo_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else known(name))
    assert main(["demo", "--runs", str(tmp_path)]) == 2
    assert "the demo needs vllm, which this Python has not" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "place",
    ["fermata_cli.run_folder._empty", "fermata_cli.cluster.identity.write_secret",
     "fermata_cli.cluster.local.prometheus_files.write_config", "fermata_cli.commands.demo.write_json"],
    ids=["emptying", "certificates", "start", "summary"],
)  # fmt: skip
def test_a_disk_that_is_full_is_one_sentence_wherever_it_is_met(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, full)
    if place.endswith("write_json"):  # what comes before it needs no engine
        monkeypatch.setattr("fermata_cli.cluster.local.prometheus_files.write_config", full)
    assert main(["demo", "--tls", "--plain", "--runs", str(tmp_path)]) == 4
    told = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    assert told == [
        f"fermata: the run in {tmp_path}/demo cannot go on (No space left on device): make room, or name another place "
        "with --runs"
    ]
