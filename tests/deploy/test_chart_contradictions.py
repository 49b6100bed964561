"""Values that contradict one another, a process or the cluster are refused, in one sentence that says what is right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.chart import check, refusal, render, workloads

TOOL = {"name": "a", "tools": ["calculator"]}
NCCL = {"weight_transfer": "nccl"}
RUNS = {"name": "r", "mountPath": "/runs/"}
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


def on_a_volume(source: dict[str, Any]) -> dict[str, Any]:
    return {
        "extraVolumes": [{"name": "ledger", **source}],
        "extraVolumeMounts": [{"name": "ledger", "mountPath": "/ledger/"}],
    }


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"tokens": {"existingSecret": "t"}},
        "tokens.existingSecret is set and tls.existingSecret is not: tokens would travel in clear, and no process "
        "sends them so; set tls.existingSecret too",
    ),
    (
        {"config": {"runtime": {"metrics_tls": True}}},
        "config.runtime.metrics_tls is true and there is no certificate: set tls.existingSecret",
    ),
    (
        {"config": {"gateway": {"drain_s": 60}, "runtime": {"shutdown_grace_s": 30}}},
        "config.gateway.drain_s is 60, and with the 4 s for closing it does not fit into "
        "config.runtime.shutdown_grace_s, 30: leave shutdown_grace_s out, or set at least 64",
    ),
    (
        {"config": {"rollout": {"handover_s": 30}, "runtime": {"shutdown_grace_s": 30}}},
        "config.rollout.handover_s is 30, and a node gives at most 0.6 of config.runtime.shutdown_grace_s, 30, to it: "
        "leave shutdown_grace_s out, or set at least 50",
    ),
    (
        {"config": {"trainer": {"dispatch": {"stop_grace_s": 25}}, "runtime": {"shutdown_grace_s": 30}}},
        "config.trainer.dispatch.stop_grace_s is 25, and with the 10 s for leaving and writing it does not fit into "
        "config.runtime.shutdown_grace_s, 30: leave shutdown_grace_s out, or set at least 35",
    ),
    (
        {"rollout": {"gpus": 4}, "config": {"rollout": {"engine": {"tensor_parallel_size": 2}}}},
        "rollout.gpus is 4, and config.rollout.engine asks for 2 (tensor_parallel_size 2 × pipeline_parallel_size 1): "
        "make them equal",
    ),
    (
        {"rollout": {"gpus": 3}, "config": {"rollout": {"engine": {"pipeline_parallel_size": 2}}}},
        "rollout.gpus is 3, and config.rollout.engine asks for 2 (tensor_parallel_size 1 × pipeline_parallel_size 2): "
        "make them equal",
    ),
    (
        {"rollout": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "rollout.resources names nvidia.com/gpu: say it with rollout.gpus alone",
    ),
    (
        {"rollout": {"gpus": 0}, "config": {"trainer": {"sync": {"backend": "nccl"}}}},
        "config.trainer.sync.backend is nccl, and rollout.gpus is 0 and trainer.gpus 1: NCCL needs GPUs at both ends; "
        "set gloo",
    ),
    (
        {"config": {"rollout": {"engine": {"weight_transfer": "gloo"}}}},
        "config.trainer.sync.backend is nccl and config.rollout.engine.weight_transfer is gloo: name the same",
    ),
    (
        {"gateway": {"enabled": False}},
        "gateway.enabled is false and config.rollout.gateway is not set: name host:port of the gateways that the "
        "rollout nodes use",
    ),
    (
        {"rollout": {"replicas": 0}},
        "there are no rollout nodes (rollout.enabled, rollout.replicas) and config.trainer.rollout_nodes is not set: "
        "name host:port of those that the trainer uses",
    ),
    (
        {"config": {"gateway": {"port": 9464}}},
        "config.gateway.port and config.runtime.metrics_port are both 9464: choose another for one of them",
    ),
    (
        {"model": {"existingClaim": "a", "hostPath": "/b"}},
        "model.existingClaim and model.hostPath are set: name one source of the model's volume",
    ),
    (
        {"model": {"existingClaim": "a", "path": "/modelsx/m"}},
        "model.path is /modelsx/m, which is not on the model's volume at /models: name a folder below model.mountPath",
    ),
    ({"tools": [TOOL, TOOL]}, "tools names a twice: give each tool its own name"),
    (
        {"tools": [{"name": "a"}]},
        "tools, a: names neither tools nor a command; name built-in tools (calculator, search), or module:object of "
        "its image",
    ),
    (
        {"tools": [{**TOOL, "args": ["x"]}]},
        "tools, a: args are for a command of its own; without one name what to serve in tools",
    ),
    (
        {"tools": [{**TOOL, "config": {"runtime": {"metrics_port": 7020}}}]},
        "tools, a: backend.port and runtime.metrics_port are both 7020: choose another for one of them",
    ),
    (
        {"tools": [{**TOOL, "probe": "grpc"}], "tls": {"existingSecret": "s"}},
        "tools, a: the kubelet's gRPC probe speaks no TLS: set probe to http, or to tcp",
    ),
    (
        {"tools": [TOOL], "config": {"gateway": {"pools": [{"name": "a", "addresses": ["b:1"]}]}}},
        "config.gateway.pools has a pool named a, and so have tools or another pool: give one of them another name",
    ),
    (
        {"config": {"gateway": {"pools": [{"name": "x"}]}}},
        "config.gateway.pools, x: name its replicas in addresses, or a name that resolves to them in dns, and not both",
    ),
    (
        {"config": {"gateway": {"drain_s": 2_592_000}}},
        "config.gateway.drain_s, config.rollout.handover_s or config.trainer.dispatch.stop_grace_s asks for a "
        "runtime.shutdown_grace_s of 2592004, and a process takes 3600 at most: lower it",
    ),
    (
        {"rollout": {"gpus": 0}, "trainer": {"enabled": False}, "config": {"rollout": {"engine": NCCL}}},
        "config.rollout.engine.weight_transfer is nccl and rollout.gpus is 0: CPUs take weights by gloo; leave it out",
    ),
    (
        {"trainer": {"gpus": 0}, "config": {"trainer": {"device": "cuda"}}},
        "config.trainer.device is cuda and trainer.gpus is 0: leave device out, or set trainer.gpus to 1",
    ),
    (
        {"config": {"trainer": {"device": "cpu"}}},
        "config.trainer.device is cpu and trainer.gpus is 1: leave device out, or set trainer.gpus to 0",
    ),
    (
        {"rollout": {"gpus": 0}, "image": {"engine": {"tag": "mine"}}},
        "image.engine names one image, and the trainer has a GPU while rollout nodes have none: vLLM for CPUs is an "
        "image of its own; leave tag and digest out",
    ),
    (
        {"config": {"trainer": {"stay": False}}},
        "config.trainer.stay is not true: a trainer that ends is started again by the cluster, and would train anew "
        "without end; leave it out",
    ),
    (
        {"config": {"trainer": {"sync": {"host": "127.0.0.1"}}}},
        "config.trainer.sync.host is 127.0.0.1, where no rollout node reaches the trainer: leave it out, it is the "
        "pod's own address",
    ),
    (
        {"config": {"gateway": {"ledger": {"max_bytes": 4 << 30}}}},
        "config.gateway.ledger.max_bytes is 4294967296, which gateway.resources.limits.memory, 2Gi, does not hold: "
        "raise the limit or lower max_bytes",
    ),
    (
        {"gateway": {"resources": {"limits": {"memory": "900M"}}}},
        "config.gateway.ledger.max_bytes is 1073741824, which gateway.resources.limits.memory, 900M, does not hold: "
        "raise the limit or lower max_bytes",
    ),
    (
        {"config": {"gateway": {"data_dir": "/ledger"}}, "gateway": {"replicas": 2, **on_a_volume(CLAIM)}},
        "config.gateway.data_dir is on the volume ledger, gateway.replicas is 2, and a ledger belongs to one gateway: "
        "set gateway.replicas to 1, or leave data_dir out",
    ),
    (
        {"trainer": {"persistence": {"enabled": False, "existingClaim": "c"}}},
        "trainer.persistence.existingClaim is c and trainer.persistence.enabled is false: set it to true, or leave the "
        "claim out",
    ),
    (
        {"config": {"trainer": {"model": "/m"}}},
        "config.rollout.model is /opt/fermata/demo/model and config.trainer.model /m: nodes serve what the trainer "
        "trains; name the folder in model.path alone",
    ),
    (
        {"model": {"subPath": "a"}},
        "model.subPath is a, and no volume has it: name one in model.existingClaim, model.hostPath or model.volume",
    ),
    (
        {"podMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "1m1s"}},
        "podMonitor.scrapeTimeout is 1m1s and podMonitor.interval 1m: Prometheus takes no timeout longer than the "
        "interval",
    ),
    (
        {"tools": [{**TOOL, "command": ["x"]}]},
        "tools, a: tools are what `python -m tool_backend` serves, and a command stands in its place: leave one of "
        "them out",
    ),
    (
        {"tools": [{"name": "a", "command": ["x"]}]},
        "tools, a: has a command of its own and no probe: set probe to http where it answers /startupz, /healthz and "
        "/readyz on runtime.metrics_port, as tool_backend does, else to grpc or tcp",
    ),
    (
        {"tools": [{**TOOL, "config": {"runtime": {"metrics_tls": True}}}]},
        "tools, a: runtime.metrics_tls is true and there is no certificate: set tls.existingSecret",
    ),
    (
        {
            "tools": [{**TOOL, "config": {"runtime": {"metrics_tls": True}}}],
            "tls": {"existingSecret": "s"},
            "podMonitor": {"enabled": True},
        },
        "tools, a: runtime.metrics_tls is not what config.runtime.metrics_tls says, "
        "and podMonitor asks all pods alike: "
        "set it there alone",
    ),
]
# What each pod says of itself: the same for all roles.
OF_PODS: list[tuple[dict[str, Any], str]] = [
    (
        {"rollout": {"tlsSecret": "mine"}},
        "rollout.tlsSecret is mine and tls.existingSecret is not set: TLS is off for all; set it, the role's own "
        "stands in its place",
    ),
    (
        {"config": {"runtime": {"node_name": "n"}}},
        "config.runtime.node_name is set, and each pod sees to that itself: leave it out",
    ),
    (
        {"config": {"gateway": {"gateway_id": "g"}}},
        "config.gateway.gateway_id is set, and each pod sees to that itself: leave it out",
    ),
    (
        {"tools": [{**TOOL, "config": {"runtime": {"parent_pid": 7}}}]},
        "tools, a: config.runtime.parent_pid is set, and each pod sees to that itself: leave it out",
    ),
    (
        {"config": {"runtime": {"metrics_host": "127.0.0.1"}}},
        "config.runtime.metrics_host is 127.0.0.1, where nobody outside the pod reaches it: leave it out (listenHost "
        "says it for all)",
    ),
    (
        {"config": {"rollout": {"host": "::1"}}},
        "config.rollout.host is ::1, where nobody outside the pod reaches it: leave it out (listenHost says it for "
        "all)",
    ),
    (
        {"tools": [{**TOOL, "config": {"backend": {"host": "localhost"}}}]},
        "tools, a: config.backend.host is localhost, where nobody outside the pod reaches it: leave it out (listenHost "
        "says it for all)",
    ),
    (
        {"model": {"existingClaim": "c", "mountPath": "/tmp", "path": "/tmp/m"}},
        "model.mountPath is /tmp, where each pod has a volume already: choose another path",
    ),
    (
        {"gateway": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
        "gateway.extraVolumes names tmp, and a volume of that name is there already: choose another name",
    ),
    (
        {"trainer": {"extraVolumes": [{"name": "state", "emptyDir": {}}]}},
        "trainer.extraVolumes names state, and a volume of that name is there already: choose another name",
    ),
    (
        {"tools": [{**TOOL, "extraVolumeMounts": [{"name": "tmp", "mountPath": "/etc/fermata/"}]}]},
        "tools, a: extraVolumeMounts mounts tmp at /etc/fermata/, where a volume is already: choose another path",
    ),
    (
        {"rollout": {"extraVolumeMounts": [{"name": "mine", "mountPath": "/mine"}]}},
        "rollout.extraVolumeMounts mounts mine, which extraVolumes does not have: name one of its volumes",
    ),
    (
        {"config": {"trainer": {"run_dir": "/runs"}}},
        "config.trainer.run_dir is /runs, which no volume holds that can be written to: name a folder below "
        "/var/lib/fermata, or mount one with extraVolumeMounts",
    ),
    (
        {"config": {"gateway": {"data_dir": "/var/lib/fermata-ledger"}}},
        "config.gateway.data_dir is /var/lib/fermata-ledger, which no volume holds that can be written to: name a "
        "folder below /var/lib/fermata, or mount one with extraVolumeMounts",
    ),
    (
        {"tools": [{**TOOL, "config": {"runtime": {"spans_dir": "/etc/fermata/spans"}}}]},
        "tools, a: config.runtime.spans_dir is /etc/fermata/spans, which no volume holds that can be written to: name "
        "a folder below /var/lib/fermata, or mount one with extraVolumeMounts",
    ),
    (
        {"rollout": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "rollout.extraEnv names A twice: give it one value",
    ),
    (
        {"gateway": {"extraEnv": [{"name": "FERMATA_GATEWAY__PORT", "value": "1"}]}},
        "gateway.extraEnv sets FERMATA_GATEWAY__PORT: settings stand in config, where ports, probes and times follow "
        "them",
    ),
    (
        {
            "config": {"trainer": {"run_dir": "/runs"}},
            "trainer": {
                "extraVolumes": [{"name": "r", "emptyDir": {}}],
                "extraVolumeMounts": [{**RUNS, "readOnly": True}],
            },
        },
        "config.trainer.run_dir is /runs, which no volume holds that can be written to: name a folder below "
        "/var/lib/fermata, or mount one with extraVolumeMounts",
    ),
    (
        {"rollout": {"shmSize": "8Gi", "resources": {"limits": {"memory": "8500M"}}}},
        "rollout.shmSize is 8Gi and resources.limits.memory 8500M: what lies in /dev/shm counts as memory, so make the "
        "limit larger",
    ),
    (
        {"trainer": {"shmSize": "64Gi"}},
        "trainer.shmSize is 64Gi and resources.limits.memory 64Gi: what lies in /dev/shm counts as memory, so make the "
        "limit larger",
    ),
    (
        {"tools": [{**TOOL, "shmSize": "2G", "resources": {"limits": {"memory": 1.5e9}}}]},
        "tools, a: shmSize is 2G and resources.limits.memory 1.5e+09: what lies in /dev/shm counts as memory, so make "
        "the limit larger",
    ),
]
TAKEN: list[dict[str, Any]] = [
    {"gateway": {"resources": {"limits": {"memory": None}}}},
    {"rollout": {"shmSize": "8Gi", "resources": {"limits": {"memory": "8.5Gi"}}}},
    {"rollout": {"shmSize": "8500M", "resources": {"limits": {"memory": "8Gi"}}}},
    {"rollout": {"shmSize": "8G", "resources": {"limits": {"memory": "8000000001000m"}}}},
    {"rollout": {"shmSize": "8000M", "resources": {"limits": {"memory": "9e9"}}}},
    {"config": {"gateway": {"data_dir": "ledger", "ledger": {"max_bytes": 4 << 30}}}},
    {
        "config": {"gateway": {"ledger": {"max_bytes": 1 << 29}}},
        "gateway": {"resources": {"limits": {"memory": "1Gi"}}},
    },
    {"config": {"gateway": {"data_dir": "/ledger"}}, "gateway": {"replicas": 1, **on_a_volume(CLAIM)}},
    {"config": {"gateway": {"data_dir": "/ledger/a"}}, "gateway": {"replicas": 2, **on_a_volume({"emptyDir": {}})}},
    {"config": {"gateway": {"data_dir": "/var/lib/fermata/l"}}, "gateway": {"replicas": 2, **on_a_volume(CLAIM)}},
    {"config": {"trainer": {"run_dir": "/var/lib/fermata/second"}}},
    {
        "config": {"trainer": {"run_dir": "/runs/a"}},
        "trainer": {"extraVolumes": [{"name": "r", "emptyDir": {}}], "extraVolumeMounts": [RUNS]},
    },
    {"podMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "59s900ms"}},
    {"image": {"engine": {"tag": "mine"}}, "rollout": {"gpus": 0}, "trainer": {"gpus": 0}},
    {"tls": {"existingSecret": "s"}, "tools": [{"name": "a", "command": ["x"], "probe": "http"}]},
    {
        "config": {"runtime": {"tls": {"cert_file": "/c/crt", "key_file": "/c/key"}, "metrics_tls": True}},
        "tokens": {"existingSecret": "t"},
        "podMonitor": {"enabled": True},
    },
]


@pytest.mark.parametrize(
    ("values", "sentence"), CONTRADICTIONS + OF_PODS, ids=[sentence for _, sentence in CONTRADICTIONS + OF_PODS]
)
def test_a_contradiction_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    said = refusal(values)
    assert sentence in said
    assert said.count("\n") <= 2, said


def test_a_ledger_on_a_claim_has_one_owner_at_a_time() -> None:
    values = {"config": {"gateway": {"data_dir": "/ledger"}}, "gateway": on_a_volume(CLAIM)}
    assert workloads(render(values))["gateway"]["spec"]["strategy"] == {"type": "Recreate"}
    for other in ({}, {"gateway": on_a_volume(CLAIM)}, {"config": {"gateway": {"data_dir": "ledger"}}}):
        strategy = workloads(render(other))["gateway"]["spec"]["strategy"]
        assert strategy == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize("values", TAKEN, ids=str)
def test_what_does_not_contradict_is_taken(values: dict[str, Any]) -> None:
    check(render(values))
