{{/*
One pod, as YAML. dict of
  root       $
  component  gateway, rollout, trainer, tool-NAME
  role       its block of values
  settings   its settings file
  section    the one it reads beside runtime: a change in these two restarts the pods
  file       name of the ConfigMap
  container  name, image, command, args, ports (name → number), probe
  gpus, startup (seconds), model (whether it reads it), env
  state      volume source of /var/lib/fermata; none where a claim template is one
*/}}
{{- define "fermata.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $role := .role -}}
{{- $runtime := .settings.runtime -}}
{{- include "fermata.podChecks" . -}}
metadata:
  annotations:
    {{- $checksum := pick .settings "runtime" .section | toYaml | sha256sum }}
    {{- $own := dict "checksum/config" $checksum "kubectl.kubernetes.io/default-container" .container.name }}
    {{- merge $own ($role.annotations | default dict) | toYaml | nindent 4 }}
  labels:
    {{- $selector := include "fermata.selector" (dict "root" $root "component" .component) | fromYaml }}
    {{- $_ := set $selector "app.kubernetes.io/part-of" "fermata" }}
    {{- merge $selector ($role.labels | default dict) ($values.commonLabels | default dict) | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "fermata.serviceAccountName" $root | quote }}
  automountServiceAccountToken: false
  # A Service named fermata-gateway would put FERMATA_GATEWAY_PORT and the like into every pod, which are no settings.
  enableServiceLinks: false
  # The process ends itself within its grace and two seconds; the kubelet comes after that.
  terminationGracePeriodSeconds: {{ addf $role.preStopSeconds (ceil $runtime.shutdown_grace_s) 10 | int }}
  securityContext:
    {{- include "fermata.merged" (dict "under" $values.podSecurityContext "over" $role.podSecurityContext) | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $role.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $role $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $role.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "fermata.selector" (dict "root" $root "component" $.component) | fromYaml)) }}
    {{- range . }}
    - {{ hasKey . "labelSelector" | ternary . (merge (deepCopy $own) .) | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container.name }}
      image: {{ .container.image | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command:
        {{- toYaml .container.command | nindent 8 }}
      {{- with .container.args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "fermata.env" . | nindent 8 }}
      {{- with $role.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $name, $port := .container.ports }}
        - name: {{ $name }}
          containerPort: {{ $port | int }}
        {{- end }}
      {{- include "fermata.probes" . | trim | nindent 6 }}
      {{- if $role.preStopSeconds }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ $role.preStopSeconds | quote }}]
      {{- end }}
      {{- include "fermata.resources" . | nindent 6 }}
      securityContext:
        {{- include "fermata.merged" (dict "under" $values.securityContext "over" $role.securityContext) | nindent 8 }}
      volumeMounts:
        {{- include "fermata.mounts" . | nindent 8 }}
  volumes:
    {{- include "fermata.volumes" . | nindent 4 }}
{{- end -}}

{{/* What the chart sets, less what extraEnv sets anew: a name stands once. */}}
{{- define "fermata.env" -}}
{{- $extra := .role.extraEnv | default list -}}
{{- $names := list -}}
{{- range $extra -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $env := list
  (dict "name" "HOME" "value" "/home/fermata")
  (dict "name" "USER" "value" "fermata")
  (dict "name" "FERMATA_RUNTIME__NODE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name")))
-}}
{{- $kept := list -}}
{{- range concat $env (.env | default list) -}}
{{- if not (has .name $names) -}}
{{- $kept = append $kept . -}}
{{- end -}}
{{- end -}}
{{- concat $kept $extra | toYaml -}}
{{- end -}}

{{/*
The budget of the startup probe is the process's own; until it has passed, the others do not ask. A rollout node has
started long before it is ready, which takes a trainer to give it weights.
*/}}
{{- define "fermata.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $scheme := .settings.runtime.metrics_tls | default false | ternary "HTTPS" "HTTP" -}}
{{- range $probe, $path := dict "startup" "/startupz" "liveness" "/healthz" "readiness" "/readyz" }}
{{ $probe }}Probe:
  {{- if eq $.container.probe "http" }}
  httpGet: {path: {{ $path }}, port: metrics, scheme: {{ $scheme }}}
  {{- else if eq $.container.probe "grpc" }}
  grpc: {port: {{ $.container.ports.grpc | int }}}
  {{- else }}
  tcpSocket: {port: grpc}
  {{- end }}
  {{- $timing := index $probes $probe }}
  {{- toYaml $timing | nindent 2 }}
  {{- if eq $probe "startup" }}
  failureThreshold: {{ divf $.startup $timing.periodSeconds | ceil | int }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "fermata.resources" -}}
{{- $resources := deepCopy (.role.resources | default dict) -}}
{{- if .gpus -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (index $resources $kind | default dict) -}}
{{- $_ := set (index $resources $kind) $.root.Values.gpuResource ($.gpus | int) -}}
{{- end -}}
{{- end -}}
{{- with $resources -}}
resources:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "fermata.mounts" -}}
- name: config
  mountPath: /etc/fermata
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/fermata
- name: state
  mountPath: /var/lib/fermata
{{- if .role.shmSize }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- name: tls
  mountPath: /run/fermata/tls
  readOnly: true
{{- end }}
{{- if .root.Values.tokens.existingSecret }}
- name: tokens
  mountPath: /run/fermata/tokens
  readOnly: true
{{- end }}
{{- if and .model (include "fermata.modelVolume" .root) }}
- name: model
  mountPath: {{ .root.Values.model.mountPath | quote }}
  {{- with .root.Values.model.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
  readOnly: true
{{- end }}
{{- with .role.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "fermata.volumes" -}}
- name: config
  configMap:
    name: {{ .file | quote }}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- with .state }}
- name: state
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.shmSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . | quote }}
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ .role.tlsSecret | default .root.Values.tls.existingSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- with .root.Values.tokens.existingSecret }}
- name: tokens
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- if and .model (include "fermata.modelVolume" .root) }}
- name: model
  {{- include "fermata.modelVolume" .root | nindent 2 }}
{{- end }}
{{- with .role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The source of the model's volume; empty where the model lies in the image. */}}
{{- define "fermata.modelVolume" -}}
{{- with .Values.model -}}
{{- if .existingClaim -}}
persistentVolumeClaim:
  claimName: {{ .existingClaim | quote }}
  readOnly: true
{{- else if .hostPath -}}
hostPath:
  path: {{ .hostPath | quote }}
  type: Directory
{{- else if .volume -}}
{{ toYaml .volume }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The image of rollout nodes and trainer: dict "root" $ "gpus" NUMBER */}}
{{- define "fermata.engineImage" -}}
{{- $tag := printf "%s-%s" .root.Chart.AppVersion (ternary "cuda" "cpu" (gt (.gpus | int) 0)) -}}
{{- include "fermata.image" (dict "root" .root "image" .root.Values.image.engine "tag" $tag) -}}
{{- end -}}

{{/*
Without GPUs the threads of torch and vLLM are as many as the CPUs asked for, not as the machine has: more would spin
for one another's time. dict "role" VALUES
*/}}
{{- define "fermata.engineEnv" -}}
{{- $resources := .role.resources | default dict -}}
{{- if and (not .role.gpus) (or ($resources.requests | default dict).cpu ($resources.limits | default dict).cpu) -}}
- name: OMP_NUM_THREADS
  valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: "1"}}
{{- else -}}
[]
{{- end -}}
{{- end -}}
