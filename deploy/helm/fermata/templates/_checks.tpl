{{/* What values.schema.json cannot say: values that contradict one another, each in one sentence. */}}
{{- define "fermata.checks" -}}
{{- $values := .Values -}}
{{- $config := $values.config -}}
{{- $settings := include "fermata.settings" . | fromYaml -}}

{{- $tls := $settings.runtime.tls | default dict -}}
{{- if and $values.tokens.existingSecret (not $tls.cert_file) -}}
{{- fail "tokens.existingSecret is set and tls.existingSecret is not: tokens would travel in clear, and no process sends them so; set tls.existingSecret too" -}}
{{- end -}}

{{- if and $settings.runtime.metrics_tls (not $tls.cert_file) -}}
{{- fail "config.runtime.metrics_tls is true and there is no certificate: set tls.existingSecret" -}}
{{- end -}}

{{- /* The ends of the processes. */ -}}
{{- $grace := $settings.runtime.shutdown_grace_s -}}
{{- if gt (include "fermata.neededGrace" . | int64) 3600 -}}
{{- fail (printf "config.gateway.drain_s, config.rollout.handover_s or config.trainer.dispatch.stop_grace_s asks for a runtime.shutdown_grace_s of %s, and a process takes 3600 at most: lower it" (include "fermata.neededGrace" .)) -}}
{{- end -}}
{{- if and $values.gateway.enabled (lt ($grace | float64) (include "fermata.gatewayNeeds" . | float64)) -}}
{{- fail (printf "config.gateway.drain_s is %v, and with the 4 s for closing it does not fit into config.runtime.shutdown_grace_s, %v: leave shutdown_grace_s out, or set at least %s" $config.gateway.drain_s $grace (include "fermata.gatewayNeeds" .)) -}}
{{- end -}}
{{- if and $values.rollout.enabled (lt ($grace | float64) (include "fermata.rolloutNeeds" . | float64)) -}}
{{- fail (printf "config.rollout.handover_s is %v, and a node gives at most 0.6 of config.runtime.shutdown_grace_s, %v, to it: leave shutdown_grace_s out, or set at least %s" $config.rollout.handover_s $grace (include "fermata.rolloutNeeds" .)) -}}
{{- end -}}
{{- if and $values.trainer.enabled (lt ($grace | float64) (include "fermata.trainerNeeds" . | float64)) -}}
{{- fail (printf "config.trainer.dispatch.stop_grace_s is %v, and with the 10 s for leaving and writing it does not fit into config.runtime.shutdown_grace_s, %v: leave shutdown_grace_s out, or set at least %s" $config.trainer.dispatch.stop_grace_s $grace (include "fermata.trainerNeeds" .)) -}}
{{- end -}}

{{- /* GPUs. */ -}}
{{- if and $values.rollout.enabled $values.rollout.gpus -}}
{{- $engine := $settings.rollout.engine -}}
{{- $tensor := $engine.tensor_parallel_size | int -}}
{{- $stages := $engine.pipeline_parallel_size | default 1 | int -}}
{{- if ne (mul $tensor $stages) ($values.rollout.gpus | int) -}}
{{- fail (printf "rollout.gpus is %d, and config.rollout.engine asks for %d (tensor_parallel_size %d × pipeline_parallel_size %d): make them equal" ($values.rollout.gpus | int) (mul $tensor $stages) $tensor $stages) -}}
{{- end -}}
{{- end -}}
{{- if and $values.rollout.enabled (not $values.rollout.gpus) (eq $settings.rollout.engine.weight_transfer "nccl") -}}
{{- fail "config.rollout.engine.weight_transfer is nccl and rollout.gpus is 0: CPUs take weights by gloo; leave it out" -}}
{{- end -}}
{{- if $values.trainer.enabled -}}
{{- $device := $settings.trainer.device | default "auto" -}}
{{- if and (hasPrefix "cuda" $device) (not $values.trainer.gpus) -}}
{{- fail (printf "config.trainer.device is %s and trainer.gpus is 0: leave device out, or set trainer.gpus to 1" $device) -}}
{{- end -}}
{{- if and (eq $device "cpu") $values.trainer.gpus -}}
{{- fail (printf "config.trainer.device is cpu and trainer.gpus is %d: leave device out, or set trainer.gpus to 0" ($values.trainer.gpus | int)) -}}
{{- end -}}
{{- if and $values.rollout.enabled $values.trainer.gpus (not $values.rollout.gpus) (or $values.image.engine.tag $values.image.engine.digest) -}}
{{- fail "image.engine names one image, and the trainer has a GPU while rollout nodes have none: vLLM for CPUs is an image of its own; leave tag and digest out" -}}
{{- end -}}
{{- end -}}
{{- range $name := list "rollout" "trainer" -}}
{{- $resources := (index $values $name).resources | default dict -}}
{{- if or (hasKey ($resources.limits | default dict) $values.gpuResource) (hasKey ($resources.requests | default dict) $values.gpuResource) -}}
{{- fail (printf "%s.resources names %s: say it with %s.gpus alone" $name $values.gpuResource $name) -}}
{{- end -}}
{{- end -}}
{{- if and $values.trainer.enabled $values.rollout.enabled -}}
{{- $backend := $settings.trainer.sync.backend -}}
{{- if and (eq $backend "nccl") (not (and $values.trainer.gpus $values.rollout.gpus)) -}}
{{- fail (printf "config.trainer.sync.backend is nccl, and rollout.gpus is %d and trainer.gpus %d: NCCL needs GPUs at both ends; set gloo" ($values.rollout.gpus | int) ($values.trainer.gpus | int)) -}}
{{- end -}}
{{- $transfer := $settings.rollout.engine.weight_transfer -}}
{{- if and (ne $transfer "auto") (ne $transfer $backend) -}}
{{- fail (printf "config.trainer.sync.backend is %s and config.rollout.engine.weight_transfer is %s: name the same" $backend $transfer) -}}
{{- end -}}
{{- end -}}

{{- /* Who finds whom. */ -}}
{{- if and $values.rollout.enabled (not $settings.rollout.gateway) -}}
{{- fail "gateway.enabled is false and config.rollout.gateway is not set: name host:port of the gateways that the rollout nodes use" -}}
{{- end -}}
{{- if and $values.trainer.enabled (not $settings.trainer.rollout_nodes) -}}
{{- fail "there are no rollout nodes (rollout.enabled, rollout.replicas) and config.trainer.rollout_nodes is not set: name host:port of those that the trainer uses" -}}
{{- end -}}
{{- if $values.trainer.enabled -}}
{{- with $settings.trainer.sync.host -}}
{{- if regexMatch "^(127\\.|::1$|localhost$)" . -}}
{{- fail (printf "config.trainer.sync.host is %s, where no rollout node reaches the trainer: leave it out, it is the pod's own address" .) -}}
{{- end -}}
{{- end -}}
{{- if not $settings.trainer.stay -}}
{{- fail "config.trainer.stay is not true: a trainer that ends is started again by the cluster, and would train anew without end; leave it out" -}}
{{- end -}}
{{- end -}}
{{- range $section := list "gateway" "rollout" -}}
{{- with index $settings $section -}}
{{- if eq (.port | int) ($settings.runtime.metrics_port | int) -}}
{{- fail (printf "config.%s.port and config.runtime.metrics_port are both %d: choose another for one of them" $section (.port | int)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The ledger in memory: config.gateway.ledger.max_bytes is 1 GiB where it is not set. */ -}}
{{- if and $values.gateway.enabled (not $settings.gateway.data_dir) -}}
{{- $memory := dig "limits" "memory" "" ($values.gateway.resources | default dict) -}}
{{- $ledger := ($settings.gateway.ledger | default dict).max_bytes | default 1073741824 -}}
{{- if and $memory (ge ($ledger | float64) (include "fermata.bytes" $memory | float64)) -}}
{{- fail (printf "config.gateway.ledger.max_bytes is %.0f, which gateway.resources.limits.memory, %v, does not hold: raise the limit or lower max_bytes" ($ledger | float64) $memory) -}}
{{- end -}}
{{- end -}}

{{- if $values.gateway.enabled -}}
{{- $shared := include "fermata.ledgerVolume" . -}}
{{- if and $shared (gt ($values.gateway.replicas | int) 1) -}}
{{- fail (printf "config.gateway.data_dir is on the volume %s, gateway.replicas is %d, and a ledger belongs to one gateway: set gateway.replicas to 1, or leave data_dir out" $shared ($values.gateway.replicas | int)) -}}
{{- end -}}
{{- end -}}

{{- with $values.podMonitor -}}
{{- if and .enabled (gt (include "fermata.seconds" .scrapeTimeout | float64) (include "fermata.seconds" .interval | float64)) -}}
{{- fail (printf "podMonitor.scrapeTimeout is %s and podMonitor.interval %s: Prometheus takes no timeout longer than the interval" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}

{{- if and $values.trainer.enabled $values.trainer.persistence.existingClaim (not $values.trainer.persistence.enabled) -}}
{{- fail (printf "trainer.persistence.existingClaim is %s and trainer.persistence.enabled is false: set it to true, or leave the claim out" $values.trainer.persistence.existingClaim) -}}
{{- end -}}

{{- /* The model, and its volume. */ -}}
{{- if and $values.rollout.enabled $values.trainer.enabled (ne $settings.rollout.model $settings.trainer.model) -}}
{{- fail (printf "config.rollout.model is %s and config.trainer.model %s: nodes serve what the trainer trains; name the folder in model.path alone" $settings.rollout.model $settings.trainer.model) -}}
{{- end -}}
{{- if and $values.model.subPath (not (include "fermata.modelVolume" .)) -}}
{{- fail (printf "model.subPath is %s, and no volume has it: name one in model.existingClaim, model.hostPath or model.volume" $values.model.subPath) -}}
{{- end -}}
{{- with $values.model -}}
{{- $sources := list -}}
{{- range $key := list "existingClaim" "hostPath" "volume" -}}
{{- if index $values.model $key -}}{{- $sources = append $sources (printf "model.%s" $key) -}}{{- end -}}
{{- end -}}
{{- if gt (len $sources) 1 -}}
{{- fail (printf "%s are set: name one source of the model's volume" (join " and " $sources)) -}}
{{- end -}}
{{- if and $sources (not (hasPrefix (printf "%s/" (.mountPath | trimSuffix "/")) (printf "%s/" .path))) -}}
{{- fail (printf "model.path is %s, which is not on the model's volume at %s: name a folder below model.mountPath" .path .mountPath) -}}
{{- end -}}
{{- end -}}

{{- include "fermata.toolChecks" . -}}
{{- end -}}

{{- define "fermata.toolChecks" -}}
{{- $root := . -}}
{{- $known := dict -}}
{{- $metricsTls := $root.Values.config.runtime.metrics_tls -}}
{{- $probed := list -}}
{{- range $root.Values.tools -}}
{{- if .probe -}}{{- $probed = append $probed .name -}}{{- end -}}
{{- end -}}
{{- range (include "fermata.tools" $root | fromYaml).tools -}}
{{- if hasKey $known .name -}}
{{- fail (printf "tools names %s twice: give each tool its own name" .name) -}}
{{- end -}}
{{- $_ := set $known .name true -}}
{{- if not (or .tools .command) -}}
{{- fail (printf "tools, %s: names neither tools nor a command; name built-in tools (calculator, search), or module:object of its image" .name) -}}
{{- end -}}
{{- if and .tools .command -}}
{{- fail (printf "tools, %s: tools are what `python -m tool_backend` serves, and a command stands in its place: leave one of them out" .name) -}}
{{- end -}}
{{- if and .args (not .command) -}}
{{- fail (printf "tools, %s: args are for a command of its own; without one name what to serve in tools" .name) -}}
{{- end -}}
{{- $settings := include "fermata.toolSettings" (dict "root" $root "tool" .) | fromYaml -}}
{{- if eq ($settings.backend.port | int) ($settings.runtime.metrics_port | int) -}}
{{- fail (printf "tools, %s: backend.port and runtime.metrics_port are both %d: choose another for one of them" .name ($settings.backend.port | int)) -}}
{{- end -}}
{{- if and .command (eq .probe "http") (not (has .name $probed)) -}}
{{- fail (printf "tools, %s: has a command of its own and no probe: set probe to http where it answers /startupz, /healthz and /readyz on runtime.metrics_port, as tool_backend does, else to grpc or tcp" .name) -}}
{{- end -}}
{{- if and $settings.runtime.metrics_tls (not ($settings.runtime.tls | default dict).cert_file) -}}
{{- fail (printf "tools, %s: runtime.metrics_tls is true and there is no certificate: set tls.existingSecret" .name) -}}
{{- end -}}
{{- if and $root.Values.podMonitor.enabled (eq .probe "http") (ne (not $settings.runtime.metrics_tls) (not $metricsTls)) -}}
{{- fail (printf "tools, %s: runtime.metrics_tls is not what config.runtime.metrics_tls says, and podMonitor asks all pods alike: set it there alone" .name) -}}
{{- end -}}
{{- if and (eq .probe "grpc") $settings.runtime.tls -}}
{{- fail (printf "tools, %s: the kubelet's gRPC probe speaks no TLS: set probe to http, or to tcp" .name) -}}
{{- end -}}
{{- end -}}
{{- range $root.Values.config.gateway.pools | default list -}}
{{- if eq (empty .addresses) (empty .dns) -}}
{{- fail (printf "config.gateway.pools, %s: name its replicas in addresses, or a name that resolves to them in dns, and not both" .name) -}}
{{- end -}}
{{- if hasKey $known .name -}}
{{- fail (printf "config.gateway.pools has a pool named %s, and so have tools or another pool: give one of them another name" .name) -}}
{{- end -}}
{{- $_ := set $known .name true -}}
{{- end -}}
{{- end -}}
