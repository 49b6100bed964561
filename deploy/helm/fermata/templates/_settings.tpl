{{/*
The settings file of gateway, rollout nodes and trainer, as YAML: what the chart knows, and over it values.config.
What is computed here depends on other values; plain defaults stand in values.yaml, where people see them.
*/}}
{{- define "fermata.settings" -}}
{{- $values := .Values -}}
{{- $config := deepCopy $values.config -}}
{{- $file := dict "runtime" (include "fermata.runtime" (dict "root" . "grace" (include "fermata.neededGrace" .)) | fromYaml) -}}

{{- if $values.gateway.enabled -}}
{{- $pools := list -}}
{{- range (include "fermata.tools" . | fromYaml).tools -}}
{{- $service := include "fermata.componentName" (dict "root" $ "component" (printf "tool-%s" .name)) -}}
{{- $port := (include "fermata.toolSettings" (dict "root" $ "tool" .) | fromYaml).backend.port -}}
{{- $pools = append $pools (dict "name" .name "dns" (include "fermata.address" (dict "root" $ "service" $service "port" $port))) -}}
{{- end -}}
{{- $own := $config.gateway | default dict -}}
{{- $_ := set $own "pools" (concat $pools ($own.pools | default list)) -}}
{{- $_ := set $file "gateway" (dict "host" $values.listenHost) -}}
{{- else -}}
{{- $config = omit $config "gateway" -}}
{{- end -}}

{{- if $values.rollout.enabled -}}
{{- $engine := dict "weight_transfer" (include "fermata.weightTransfer" .) -}}
{{- if $values.rollout.gpus -}}
{{- $stages := dig "rollout" "engine" "pipeline_parallel_size" 1 $config | default 1 | int -}}
{{- $_ := set $engine "tensor_parallel_size" (div ($values.rollout.gpus | int) $stages | max 1) -}}
{{- else -}}
{{- /* A container has a share of the machine, not the cores it sees: OMP_NUM_THREADS says how many (_pod.tpl). */ -}}
{{- $_ := set $engine "cpu_omp_threads_bind" "nobind" -}}
{{- end -}}
{{- $rollout := dict "host" $values.listenHost "model" $values.model.path "engine" $engine -}}
{{- if $values.gateway.enabled -}}
{{- $service := include "fermata.componentName" (dict "root" . "component" "gateway") -}}
{{- $_ := set $rollout "gateway" (list (include "fermata.address" (dict "root" . "service" $service "port" $config.gateway.port))) -}}
{{- end -}}
{{- $_ := set $file "rollout" $rollout -}}
{{- else -}}
{{- $config = omit $config "rollout" -}}
{{- end -}}

{{- if $values.trainer.enabled -}}
{{- $trainer := dict
  "model" $values.model.path
  "run_dir" "/var/lib/fermata/run"
  "sync" (dict "backend" (include "fermata.weightTransfer" .))
-}}
{{- if $values.rollout.enabled -}}
{{- $name := include "fermata.componentName" (dict "root" . "component" "rollout") -}}
{{- $nodes := list -}}
{{- range $number := until ($values.rollout.replicas | int) -}}
{{- $service := printf "%s-%d.%s" $name $number $name -}}
{{- $nodes = append $nodes (include "fermata.address" (dict "root" $ "service" $service "port" $config.rollout.port)) -}}
{{- end -}}
{{- $_ := set $trainer "rollout_nodes" $nodes -}}
{{- /* A node starts within its own budget, once its image is there. */ -}}
{{- $_ := set $trainer "dispatch" (dict "startup_timeout_s" (add (include "fermata.rolloutStartup" . | int64) 600)) -}}
{{- end -}}
{{- $_ := set $file "trainer" $trainer -}}
{{- else -}}
{{- $config = omit $config "trainer" -}}
{{- end -}}

{{- mergeOverwrite $file $config | toYaml -}}
{{- end -}}

{{/* What the chart fills into `runtime`: dict "root" $ "grace" SECONDS. */}}
{{- define "fermata.runtime" -}}
{{- $runtime := dict "metrics_host" .root.Values.listenHost "shutdown_grace_s" (.grace | int64) -}}
{{- with .root.Values.tls -}}
{{- if .existingSecret -}}
{{- $tls := dict
  "ca_file" (printf "/run/fermata/tls/%s" .caKey)
  "cert_file" (printf "/run/fermata/tls/%s" .certKey)
  "key_file" (printf "/run/fermata/tls/%s" .keyKey)
  "require_client_cert" .mutual
-}}
{{- if .serverName -}}{{- $_ := set $tls "server_name" .serverName -}}{{- end -}}
{{- $_ := set $runtime "tls" $tls -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.tokens -}}
{{- if .existingSecret -}}
{{- $_ := set $runtime "tokens" (dict
  "accept_file" (printf "/run/fermata/tokens/%s" .acceptKey)
  "send_file" (printf "/run/fermata/tokens/%s" .sendKey)
) -}}
{{- end -}}
{{- end -}}
{{- $runtime | toYaml -}}
{{- end -}}

{{/* nccl where both ends have GPUs, else gloo; what an outside trainer wants is its own affair. */}}
{{- define "fermata.weightTransfer" -}}
{{- if not .Values.trainer.enabled -}}
auto
{{- else if and .Values.trainer.gpus (or .Values.rollout.gpus (not .Values.rollout.enabled)) -}}
nccl
{{- else -}}
gloo
{{- end -}}
{{- end -}}

{{/* Seconds of runtime.shutdown_grace_s that the orderly ends of all three need. */}}
{{- define "fermata.neededGrace" -}}
{{- $needed := 20 -}}
{{- if .Values.gateway.enabled -}}
{{- $needed = maxf $needed (include "fermata.gatewayNeeds" .) -}}
{{- end -}}
{{- if .Values.rollout.enabled -}}
{{- $needed = maxf $needed (include "fermata.rolloutNeeds" .) -}}
{{- end -}}
{{- if .Values.trainer.enabled -}}
{{- $needed = maxf $needed (include "fermata.trainerNeeds" .) -}}
{{- end -}}
{{- ceil $needed | int64 -}}
{{- end -}}

{{/* A gateway keeps 4 s of its grace for handing out the last results and closing. */}}
{{- define "fermata.gatewayNeeds" -}}
{{- addf .Values.config.gateway.drain_s 4 | ceil | int64 -}}
{{- end -}}

{{/* A rollout node gives at most 0.6 of its grace to turns and the handing over. */}}
{{- define "fermata.rolloutNeeds" -}}
{{- divf .Values.config.rollout.handover_s 0.6 | ceil | int64 -}}
{{- end -}}

{{/* A trainer waits for the ends of its trajectories, leaves the transfer group (5 s) and writes what it has. */}}
{{- define "fermata.trainerNeeds" -}}
{{- addf .Values.config.trainer.dispatch.stop_grace_s 10 | ceil | int64 -}}
{{- end -}}

{{/* Seconds a rollout node may take to be ready: it waits for a gateway, then for its engine. */}}
{{- define "fermata.rolloutStartup" -}}
{{- addf .Values.config.rollout.gateway_wait_s .Values.config.rollout.engine.start_timeout_s 60 | ceil | int64 -}}
{{- end -}}
