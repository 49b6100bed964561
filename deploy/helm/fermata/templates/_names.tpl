{{/* Names and labels. Selectors hold name, instance and component alone, so that no upgrade of the chart changes them. */}}

{{- define "fermata.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "objects would be named %q: the name must begin with a letter and hold a-z, 0-9 and '-' alone; set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/*
Name of one object: dict "root" $ "component" "rollout". At most 52 characters, so that what Kubernetes adds to it
(a pod's number, a revision's hash) and "-headless" stay within 63; what is cut off is kept apart by a hash.
*/}}
{{- define "fermata.componentName" -}}
{{- $full := printf "%s-%s" (include "fermata.fullname" .root) .component -}}
{{- if gt (len $full) 52 -}}
{{- $full = printf "%s-%s" ($full | trunc 43 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "fermata.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{- define "fermata.labels" -}}
{{- $standard := include "fermata.selector" . | fromYaml -}}
{{- $_ := set $standard "app.kubernetes.io/part-of" "fermata" -}}
{{- $_ := set $standard "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $standard "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $standard "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63) -}}
{{- merge $standard (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{- define "fermata.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else -}}
{{- .Values.serviceAccount.create | ternary (include "fermata.fullname" . | trunc 63 | trimSuffix "-") "default" -}}
{{- end -}}
{{- end -}}

{{/*
dict "root" $ "image" (repository, tag, digest, a tool's also registry) "tag" (where none is given). A repository whose
first part is a host, as Docker tells one, names its registry itself.
*/}}
{{- define "fermata.image" -}}
{{- $registry := .root.Values.image.registry -}}
{{- if hasKey .image "registry" -}}
{{- $registry = .image.registry -}}
{{- else if regexMatch "^(localhost|[^/]*[.:][^/]*)/" .image.repository -}}
{{- $registry = "" -}}
{{- end -}}
{{- $registry = $registry | default "" | trimSuffix "/" -}}
{{- $name := printf "%s/%s" $registry .image.repository | trimPrefix "/" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .tag) -}}
{{- end -}}
{{- end -}}

{{/* host:port of a headless or other Service: dict "root" $ "service" NAME "port" PORT */}}
{{- define "fermata.address" -}}
{{- printf "%s.%s.svc:%d" .service .root.Release.Namespace (.port | int) -}}
{{- end -}}
