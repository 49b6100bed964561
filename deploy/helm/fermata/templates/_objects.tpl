{{/* Objects that several roles have. Each takes dict "root" $ "component" NAME and what is named below. */}}

{{/* metadata: also "name" */}}
{{- define "fermata.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "fermata.labels" . | nindent 2 }}
{{- end -}}

{{/* A block of values with another over it, as YAML; both may be missing: dict "under" BLOCK "over" BLOCK */}}
{{- define "fermata.merged" -}}
{{- mergeOverwrite (deepCopy (.under | default dict)) (deepCopy (.over | default dict)) | toYaml -}}
{{- end -}}

{{/* A Service: also "name", "ports" (name → number), "headless", "unready" */}}
{{- define "fermata.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "fermata.metadata" . | nindent 2 }}
spec:
  {{- if .headless }}
  clusterIP: None
  {{- else }}
  type: ClusterIP
  # A client whose stream broke comes back to the gateway that holds its session, while that lives.
  sessionAffinity: ClientIP
  {{- end }}
  {{- if .unready }}
  # Peers know these pods by name and wait for them themselves.
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "fermata.selector" . | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - name: {{ $name }}
      port: {{ $port | int }}
      targetPort: {{ $name }}
      {{- if eq $name "grpc" }}
      appProtocol: grpc
      {{- end }}
    {{- end }}
{{- end -}}

{{/* The volume outside the gateway's pod that its ledger lies on; empty where the ledger is in memory or the pod's own. */}}
{{- define "fermata.ledgerVolume" -}}
{{- $folder := (include "fermata.settings" . | fromYaml).gateway.data_dir | default "" | printf "%s/" -}}
{{- $own := list -}}
{{- range .Values.gateway.extraVolumes -}}
{{- if or .emptyDir .ephemeral (hasKey . "emptyDir") -}}
{{- $own = append $own .name -}}
{{- end -}}
{{- end -}}
{{- $found := "" -}}
{{- range .Values.gateway.extraVolumeMounts -}}
{{- if and (hasPrefix (trimSuffix "/" .mountPath | printf "%s/") $folder) (not (has .name $own)) -}}
{{- $found = .name -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* A PodDisruptionBudget, where there is more than one pod: also "name", "replicas" */}}
{{- define "fermata.disruption" -}}
{{- if and .root.Values.podDisruptionBudget.enabled (gt (.replicas | int) 1) -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "fermata.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # A rollout node that waits for weights is not ready, and may be waiting for long: it is no reason to keep a machine up.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "fermata.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}
