"""Settings: precedence, refusals with the nearest name, one sentence for each wrong thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator

from node_runtime import addresses, settings
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import Section, SettingsError


class Limits(Section):
    max_calls: int = Field(default=8, ge=1, le=1000, description="calls at once")
    deadline_s: float = Field(default=30.0, gt=0)


class Pool(Section):
    addresses: tuple[str, ...] = ()
    weight: float = 1.0


class Gateway(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=7010, ge=0, le=65535, description="port it listens on")
    store: Literal["memory", "sqlite"] = "memory"
    journal: Path | None = None
    verbose: bool = False
    limits: Limits = Limits()
    pools: dict[str, Pool] = Field(default_factory=dict)
    stages: list[Limits] = Field(default_factory=list)
    either: int | list[int] = 0

    @model_validator(mode="after")
    def _journal(self) -> Gateway:
        if self.store == "sqlite" and self.journal is None:
            raise ValueError("store sqlite needs a journal: set gateway.journal")
        return self


class Peer(Section):
    address: str = "127.0.0.1:1"

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        addresses.split(value)
        return value


class Needs(Section):
    model: str
    folder: Path = Path("runs/x")


SCHEMA: Mapping[str, type[Section]] = {"gateway": Gateway, "runtime": RuntimeSettings}


def load(
    text: str | None, tmp_path: Path, *, env: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> Gateway:
    file = None
    if text is not None:
        file = tmp_path / "fermata.yaml"
        file.write_text(text)
    loaded = settings.load(SCHEMA, file=file, env=env or {}, overrides=overrides)["gateway"]
    assert isinstance(loaded, Gateway)
    return loaded


def refusal(
    text: str | None, tmp_path: Path, *, env: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text, tmp_path, env=env, overrides=overrides)
    assert caught.value.exit_code == 2
    told = str(caught.value).replace(f"{tmp_path}/", "")
    for alien in ("pydantic", "Traceback", "validation error", "input_value", "yaml."):
        assert alien not in told
    return told


def test_defaults_without_any_source(tmp_path: Path) -> None:
    assert load(None, tmp_path) == Gateway()


def test_precedence_is_flag_then_environment_then_file_key_by_key(tmp_path: Path) -> None:
    text = "gateway:\n  host: file\n  port: 1\n  limits: {max_calls: 1, deadline_s: 1.5}\n"
    env = {"FERMATA_GATEWAY__PORT": "2", "FERMATA_GATEWAY__LIMITS__MAX_CALLS": "2", "HOME": "/x"}
    loaded = load(text, tmp_path, env=env, overrides=["gateway.limits.max_calls=3"])
    assert (loaded.host, loaded.port) == ("file", 2)
    assert loaded.limits == Limits(max_calls=3, deadline_s=1.5)


def test_a_mapping_given_later_adds_to_the_earlier_one(tmp_path: Path) -> None:
    text = "gateway:\n  pools:\n    calculator: {addresses: ['a:1'], weight: 2.0}\n"
    loaded = load(text, tmp_path, overrides=["gateway.pools={calculator: {weight: 3}, search: {addresses: [b:2]}}"])
    assert loaded.pools == {
        "calculator": Pool(addresses=("a:1",), weight=3.0),
        "search": Pool(addresses=("b:2",)),
    }


def test_sections_of_other_processes_are_accepted_by_name(tmp_path: Path) -> None:
    env = {"FERMATA_TRAINER__LR": "1"}
    loaded = load("trainer: {anything: [1]}\ngateway: {port: 9}\n", tmp_path, env=env, overrides=["rollout.model=x"])
    assert loaded.port == 9


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load("gateway:\nruntime:\n", tmp_path) == Gateway()
    assert load("", tmp_path) == Gateway()


@pytest.mark.parametrize(
    ("text", "env", "overrides", "told"),
    [
        ("gateway:\n  prot: 1\n", {}, [], "fermata.yaml:2: unknown key 'gateway.prot': did you mean 'port'?"),
        (
            "gateway:\n  limits:\n\n    max_cals: 1\n",
            {},
            [],
            "fermata.yaml:4: unknown key 'gateway.limits.max_cals': did you mean 'max_calls'?",
        ),
        (
            "gateway:\n  pools:\n    calculator:\n      adresses: []\n",
            {},
            [],
            "fermata.yaml:4: unknown key 'gateway.pools.calculator.adresses': did you mean 'addresses'?",
        ),
        (
            "gateway:\n  stages:\n  - max_calls: 1\n  - max_call: 2\n",
            {},
            [],
            "fermata.yaml:4: unknown key 'gateway.stages[1].max_call': did you mean 'max_calls'?",
        ),
        ("gatway: {}\n", {}, [], "fermata.yaml:1: unknown section 'gatway': did you mean 'gateway'?"),
        (
            None,
            {"FERMATA_GATEWAY__PROT": "1"},
            [],
            "FERMATA_GATEWAY__PROT: unknown key 'gateway.prot': did you mean 'port'?",
        ),
        (
            None,
            {"FERMATA_GATWAY__PORT": "1"},
            [],
            "FERMATA_GATWAY__PORT: no setting has this name; variables begin with a section: "
            "did you mean 'FERMATA_GATEWAY__'?",
        ),
        (None, {"FERMATA_GATEWAY": "1"}, [], "FERMATA_GATEWAY: does not name a key: write FERMATA_GATEWAY__KEY=value"),
        (
            None,
            {},
            ["gateway.limits.deadlines=1"],
            "--set gateway.limits.deadlines: unknown key 'gateway.limits.deadlines': did you mean 'deadline_s'?",
        ),
        (None, {}, ["gatewey.port=1"], "--set gatewey.port: unknown section 'gatewey': did you mean 'gateway'?"),
        (None, {}, ["gateway.port"], "--set gateway.port: has no '=': write --set section.key=value"),
        (None, {}, ["gateway=1"], "--set gateway: does not name a key: write --set gateway.key=value"),
        (
            "gateway:\n  stages: []\n",
            {},
            ["gateway.stages.0.max_calls=1"],
            "--set gateway.stages.0.max_calls: gateway.stages is a list: give the whole list, not an item of it",
        ),
        (
            "gateway:\n  qqqqqq: 1\n",
            {},
            [],
            "fermata.yaml:2: unknown key 'gateway.qqqqqq': known there: "
            "either, host, journal, limits, pools, port, stages, store, verbose.",
        ),
    ],
)
def test_unknown_names(
    tmp_path: Path, text: str | None, env: Mapping[str, str], overrides: Sequence[str], told: str
) -> None:
    assert refusal(text, tmp_path, env=env, overrides=overrides) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("port: many", 'gateway.port must be an integer, got the text "many"'),
        ("port: '7010'", 'gateway.port must be an integer, got the text "7010"'),
        ("port: true", "gateway.port must be an integer, got true"),
        ("port: 7010.5", "gateway.port must be an integer, got 7010.5"),
        ("port: 70000", "gateway.port must be less than or equal to 65535, got 70000"),
        ("port:", "gateway.port must be an integer, got null"),
        ("host: 7", "gateway.host must be text, got 7"),
        ("store: redis", "gateway.store must be 'memory' or 'sqlite', got the text \"redis\""),
        ("verbose: 'yes'", 'gateway.verbose must be true or false, got the text "yes"'),
        ("verbose: yes", 'gateway.verbose must be true or false, got the text "yes"'),
        ("limits: 3", "gateway.limits must be a mapping, got 3"),
        ("limits: []", "gateway.limits must be a mapping, got a list []"),
        ("journal: 5", "gateway.journal must be text, got 5"),
        ("stages: {}", "gateway.stages must be a list, got a mapping {}"),
        ("either: x", 'gateway.either must be an integer or a list, got the text "x"'),
        ("limits: {deadline_s: .nan}", "gateway.limits.deadline_s must be a finite number, got NaN"),
        ("store: sqlite", "gateway: store sqlite needs a journal: set gateway.journal"),
    ],
)
def test_wrong_types_are_one_sentence_each(tmp_path: Path, value: str, told: str) -> None:
    line = 1 if value.startswith("store: sqlite") else 2
    assert refusal(f"gateway:\n  {value}\n", tmp_path) == f"fermata.yaml:{line}: {told}"


def test_all_problems_are_told_at_once_with_their_sources(tmp_path: Path) -> None:
    told = refusal(
        "gateway:\n  port: x\n",
        tmp_path,
        env={"FERMATA_RUNTIME__LOG_LEVEL": "loud"},
        overrides=["gateway.verbos=true"],
    )
    assert told.splitlines() == [
        "--set gateway.verbos: unknown key 'gateway.verbos': did you mean 'verbose'?",
        'fermata.yaml:2: gateway.port must be an integer, got the text "x"',
        "FERMATA_RUNTIME__LOG_LEVEL: runtime.log_level must be 'debug', 'info', 'warning' or 'error', "
        'got the text "loud"',
    ]


def test_a_required_key_that_is_missing() -> None:
    with pytest.raises(SettingsError, match=r"^rollout\.model is missing: set it in the file or with --set"):
        settings.load({"rollout": Needs}, file=None, env={})


def test_a_node_error_of_a_validator_is_told_like_the_rest() -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load({"rollout": Peer}, file=None, env={}, overrides=["rollout.address=here"])
    assert str(caught.value).startswith("--set rollout.address: rollout: 'here' is not an address: write host:port")


def test_text_settings_take_flags_and_variables_as_they_stand(tmp_path: Path) -> None:
    env = {"FERMATA_GATEWAY__JOURNAL": "0017"}
    for text in ("7", "true", "null_", "a: b: c", "[x", "1e5", "2024-01-01", "@x", "{a: 1}"):
        loaded = load(None, tmp_path, env=env, overrides=[f"gateway.host={text}"])
        assert loaded.host == text
        assert loaded.journal == Path("0017")
    assert load(None, tmp_path, overrides=["gateway.journal="]).journal is None
    assert refusal(None, tmp_path, overrides=["gateway.host="]).endswith("gateway.host must be text, got null")


def test_numbers_read_as_people_write_them(tmp_path: Path) -> None:
    loaded = load("gateway:\n  port: 0x10\n  limits: {deadline_s: 5e-5}\n", tmp_path)
    assert (loaded.port, loaded.limits.deadline_s) == (16, 5e-5)
    assert load("gateway: {limits: {deadline_s: 3}}", tmp_path).limits.deadline_s == 3.0
    assert load("gateway: {port: 0123}", tmp_path).port == 123  # YAML 1.2: decimal, not octal
    assert load(None, tmp_path, overrides=["gateway.host=on"]).host == "on"
    assert load("gateway: {host: 10:30}", tmp_path).host == "10:30"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"gateway:\n  port: [1, 2\n", "fermata.yaml:3:1: is not YAML: "),
        (b"gateway:\n\tport: 1\n", "fermata.yaml:2:1: is not YAML: found character '\\t' that cannot start any token"),
        (b"- 1\n- 2\n", "fermata.yaml: holds a list, it must be a mapping of sections such as 'runtime:'"),
        (b"hello", "fermata.yaml: holds a single value, it must be a mapping of sections such as 'runtime:'"),
        (b"gateway:\n  port: 1\n  port: 2\n", "fermata.yaml:3: gateway.port stands twice (first on line 2): "),
        (b"gateway:\n  a: &x 1\n  b: *x\n", "fermata.yaml:3:6: is not YAML: an alias (*name), which settings do not"),
        (b"gateway:\n  host: \xff\n", "fermata.yaml:2: is not UTF-8 (byte 0xff): save it as UTF-8"),
        (b"gateway: {a: !!python/object:os.system x}", "fermata.yaml:1:14: is not YAML: could not determine"),
        (b"gateway: {host: \x00}", "fermata.yaml:1: is not YAML: special characters are not allowed"),
        (b"? [a]\n: 1\n", "fermata.yaml:1: has a key that is not a name: write 'name: value'"),
        (b"gateway: 5\n", "fermata.yaml:1: gateway must be a mapping, got 5"),
        (b"gateway: {port: 1}\n---\ngateway: {}\n", "fermata.yaml:2:1: is not YAML: but found another document"),
        (b"[" * 20000, "fermata.yaml"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, raw: bytes, told: str) -> None:
    file = tmp_path / "fermata.yaml"
    file.write_bytes(raw)
    with pytest.raises(SettingsError) as caught:
        settings.load(SCHEMA, file=file, env={})
    text = str(caught.value).removeprefix(f"{tmp_path}/")
    assert text.startswith(told)
    assert "\n" not in text


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: no such file: give an existing settings file with --config"):
        settings.load(SCHEMA, file=tmp_path / "none.yaml", env={})
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        settings.load(SCHEMA, file=tmp_path, env={})


def test_schema_keys_lists_every_key_with_type_default_and_description() -> None:
    keys = {key.key: key for key in settings.schema_keys({"gateway": Gateway, "rollout": Needs})}
    assert (keys["gateway.port"].type, keys["gateway.port"].default) == ("integer", "7010")
    assert keys["gateway.port"].description == "port it listens on"
    assert keys["gateway.limits.deadline_s"].default == "30.0"
    assert keys["gateway.journal"].type == "path or null"
    assert keys["gateway.store"].type == "one of memory, sqlite"
    assert keys["gateway.pools.<name>.addresses"].type == "list of string"
    assert keys["gateway.stages[].max_calls"].default == "8"
    assert keys["rollout.model"].default == "required"
    assert (keys["gateway.port"].within, keys["gateway.limits.deadline_s"].within) == ("0 to 65535", "over 0")
    assert (keys["gateway.stages"].type, keys["gateway.stages"].value) == ("list of mapping", [])


names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
gateways = st.builds(
    Gateway,
    host=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
    port=st.integers(0, 65535),
    verbose=st.booleans(),
    limits=st.builds(
        Limits, max_calls=st.integers(1, 1000), deadline_s=st.floats(0, 1e300, exclude_min=True, allow_nan=False)
    ),
    pools=st.dictionaries(names, st.builds(Pool, addresses=st.lists(names).map(tuple)), max_size=3),
)


@given(gateways)
def test_dump_is_read_back_as_the_same_settings(tmp_path_factory: pytest.TempPathFactory, gateway: Gateway) -> None:
    file = tmp_path_factory.mktemp("dump") / "f.yaml"
    file.write_text(settings.dump({"gateway": gateway}), encoding="utf-8")
    assert settings.load({"gateway": Gateway}, file=file, env={}) == {"gateway": gateway}


@given(gateways)
def test_flags_and_variables_say_the_same_as_the_file(gateway: Gateway) -> None:
    flags = [f"gateway.port={gateway.port}", f"gateway.limits.deadline_s={gateway.limits.deadline_s!r}"]
    env = {
        "FERMATA_GATEWAY__VERBOSE": str(gateway.verbose).lower(),
        "FERMATA_GATEWAY__LIMITS__MAX_CALLS": str(gateway.limits.max_calls),
    }
    loaded = settings.load({"gateway": Gateway}, file=None, env=env, overrides=flags)["gateway"]
    assert isinstance(loaded, Gateway)
    assert (loaded.port, loaded.verbose, loaded.limits) == (gateway.port, gateway.verbose, gateway.limits)


@given(name=names.filter(lambda name: name not in Gateway.model_fields), depth=st.sampled_from(["", "limits."]))
def test_no_unknown_key_gets_through(name: str, depth: str) -> None:
    if depth and name in Limits.model_fields:
        return
    with pytest.raises(SettingsError, match="unknown key"):
        settings.load({"gateway": Gateway}, file=None, env={}, overrides=[f"gateway.{depth}{name}=1"])


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*Gateway.model_fields, "zz"]), junk))
def test_whatever_the_file_holds_it_loads_or_is_told_in_lines(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    file = tmp_path_factory.mktemp("junk") / "f.yaml"
    file.write_text(yaml.safe_dump({"gateway": tree}, allow_unicode=True), encoding="utf-8")
    told = ""
    try:
        settings.load({"gateway": Gateway}, file=file, env={})
    except SettingsError as error:
        told = str(error)
    assert all(line.startswith(str(file)) for line in told.splitlines())


def test_a_process_ends_with_the_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        settings.load_for_process("tool_gateway", SCHEMA, ["--set", "gateway.prot=1"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told == "tool_gateway: --set gateway.prot: unknown key 'gateway.prot': did you mean 'port'?\n"
    (tmp_path / "f.yaml").write_text("gateway: {port: 5}")
    monkeypatch.setenv("FERMATA_CONFIG", str(tmp_path / "f.yaml"))
    loaded = settings.load_for_process("tool_gateway", SCHEMA, [])["gateway"]
    assert isinstance(loaded, Gateway)
    assert loaded.port == 5


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings.load_for_process("tool_gateway", SCHEMA, ["--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "gateway.limits.max_calls  (integer, 1 to 1000; default 8)" in told
    assert "runtime.tls.ca_file" in told


def test_tls_files_belong_together() -> None:
    for overrides, part in (
        (["runtime.tls.cert_file=a.pem"], "runtime.tls: names only one of cert_file and key_file: name key_file too"),
        (["runtime.tls.require_client_cert=true"], "runtime.tls: require_client_cert needs ca_file"),
    ):
        with pytest.raises(SettingsError) as caught:
            settings.load({"runtime": RuntimeSettings}, file=None, env={}, overrides=overrides)
        assert part in str(caught.value)
