{{/* The tools, each with toolDefaults under what it says itself: {"tools": [...]}, as YAML. */}}
{{- define "fermata.tools" -}}
{{- $tools := list -}}
{{- range .Values.tools -}}
{{- $tools = append $tools (mergeOverwrite (deepCopy $.Values.toolDefaults) (deepCopy .)) -}}
{{- end -}}
{{- dict "tools" $tools | toYaml -}}
{{- end -}}

{{/* The settings file of one tool: dict "root" $ "tool" (from fermata.tools). */}}
{{- define "fermata.toolSettings" -}}
{{- $config := .tool.config | default dict -}}
{{- $runtime := deepCopy (.root.Values.config.runtime | default dict) -}}
{{- $runtime = mergeOverwrite $runtime (deepCopy ($config.runtime | default dict)) -}}
{{- $computed := include "fermata.runtime" (dict "root" .root "tlsSecret" .tool.tlsSecret "grace" 20) | fromYaml -}}
{{- $backend := dict "host" .root.Values.listenHost "port" 7020 -}}
{{- dict
  "runtime" (mergeOverwrite $computed $runtime)
  "backend" (mergeOverwrite $backend (deepCopy ($config.backend | default dict)))
| toYaml -}}
{{- end -}}
