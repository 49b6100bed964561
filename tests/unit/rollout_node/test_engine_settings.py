"""The engine's settings and the environment its processes start in."""

from __future__ import annotations

import subprocess
import sys

import pydantic
import pytest

from rollout_node.engine_build import engine_args
from rollout_node.engine_env import OWNER_VARIABLE, prepare_environment
from rollout_node.engine_settings import EngineSettings


def test_settings_import_without_torch_and_vllm() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "import rollout_node.engine_settings, rollout_node.engine_env, rollout_node.engine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_everything_of_the_engine_can_be_set_and_the_rest_is_left_to_vllm() -> None:
    args = engine_args(EngineSettings(model="m"), "nccl")
    assert args["weight_transfer_config"] == {"backend": "nccl"}
    assert args["scheduling_policy"] == "priority"
    assert "max_model_len" not in args
    assert "kv_cache_memory_bytes" not in args
    full = engine_args(
        EngineSettings(model="m", tensor_parallel_size=4, kv_cache_gib=0.5, max_model_len=99, extra={"swap_space": 1}),
        "gloo",
    )
    assert (full["tensor_parallel_size"], full["kv_cache_memory_bytes"], full["max_model_len"]) == (4, 2**29, 99)
    assert full["swap_space"] == 1


@pytest.mark.parametrize("name", ["model", "scheduling_policy", "worker_extension_cls", "max_num_seqs"])
def test_extra_cannot_undo_what_the_node_needs(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=f"'{name}' is not for 'extra'"):
        EngineSettings(model="m", extra={name: 1})


def test_the_environment_spawns_stays_offline_and_keeps_stdout_clean() -> None:
    env: dict[str, str] = {}
    prepare_environment(EngineSettings(model="m", cpu_omp_threads_bind="0"), env)
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert not OWNER_VARIABLE.startswith("FERMATA_")
    assert "VLLM_PLUGINS" not in env


def test_a_plugin_list_of_the_users_gets_ours_too() -> None:
    env = {"VLLM_PLUGINS": "theirs"}
    prepare_environment(EngineSettings(model="m"), env)
    assert env["VLLM_PLUGINS"] == "theirs,fermata"
    prepare_environment(EngineSettings(model="m"), env)
    assert env["VLLM_PLUGINS"] == "theirs,fermata"
