{{/*
Values that a pod contradicts, each in one sentence: what the cluster would refuse or the process die of. Takes what
fermata.pod takes.
*/}}
{{- define "fermata.podChecks" -}}
{{- $role := .role -}}
{{- $settings := .settings -}}
{{- $at := printf "%s." .component -}}
{{- $config := "config" -}}
{{- if hasPrefix "tool-" .component -}}
{{- $at = printf "tools, %s: " (trimPrefix "tool-" .component) -}}
{{- $config = printf "%sconfig" $at -}}
{{- end -}}

{{- /* What each pod has for itself, and what only a process with a parent has. */ -}}
{{- range $key := list "runtime.node_name" "runtime.exit_with_parent" "runtime.parent_pid" "gateway.gateway_id" -}}
{{- $path := splitList "." $key -}}
{{- if and (has (first $path) (list "runtime" $.section)) (hasKey (index $settings (first $path)) (last $path)) -}}
{{- fail (printf "%s.%s is set, and each pod sees to that itself: leave it out" $config $key) -}}
{{- end -}}
{{- end -}}

{{- /* Where it listens. */ -}}
{{- range $key := list "runtime.metrics_host" (printf "%s.host" .section) -}}
{{- $path := splitList "." $key -}}
{{- $host := index $settings (first $path) (last $path) | default "" -}}
{{- if regexMatch "^(127\\.|::1$|localhost$)" $host -}}
{{- fail (printf "%s.%s is %s, where nobody outside the pod reaches it: leave it out (listenHost says it for all)" $config $key $host) -}}
{{- end -}}
{{- end -}}

{{- if and $role.tlsSecret (not .root.Values.tls.existingSecret) -}}
{{- fail (printf "%stlsSecret is %s and tls.existingSecret is not set: TLS is off for all; set it, the role's own stands in its place" $at $role.tlsSecret) -}}
{{- end -}}

{{- /* Volumes: names and places are given once. */ -}}
{{- $names := dict -}}
{{- $places := dict -}}
{{- range include "fermata.mounts" (dict "root" .root "model" .model "role" (omit $role "extraVolumeMounts")) | fromYamlArray -}}
{{- if hasKey $places .mountPath -}}
{{- fail (printf "model.mountPath is %s, where each pod has a volume already: choose another path" .mountPath) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- $_ := set $places .mountPath (not .readOnly) -}}
{{- end -}}
{{- range $role.extraVolumes -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%sextraVolumes names %s, and a volume of that name is there already: choose another name" $at .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- range $role.extraVolumeMounts -}}
{{- $place := .mountPath | trimSuffix "/" -}}
{{- if hasKey $places $place -}}
{{- fail (printf "%sextraVolumeMounts mounts %s at %s, where a volume is already: choose another path" $at .name .mountPath) -}}
{{- end -}}
{{- if not (hasKey $names .name) -}}
{{- fail (printf "%sextraVolumeMounts mounts %s, which extraVolumes does not have: name one of its volumes" $at .name) -}}
{{- end -}}
{{- $_ := set $places $place (not .readOnly) -}}
{{- end -}}

{{- /* What the process writes. A relative path is one below /var/lib/fermata, where it works. */ -}}
{{- range $key := list "runtime.spans_dir" "gateway.data_dir" "trainer.run_dir" -}}
{{- $path := splitList "." $key -}}
{{- if has (first $path) (list "runtime" $.section) -}}
{{- $folder := index $settings (first $path) (last $path) | default "" -}}
{{- $writable := not (hasPrefix "/" $folder) -}}
{{- range $place, $may := $places -}}
{{- if and $may (hasPrefix (printf "%s/" $place) (printf "%s/" $folder)) -}}
{{- $writable = true -}}
{{- end -}}
{{- end -}}
{{- if not $writable -}}
{{- fail (printf "%s.%s is %s, which no volume holds that can be written to: name a folder below /var/lib/fermata, or mount one with extraVolumeMounts" $config $key $folder) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The environment. */ -}}
{{- $names = dict -}}
{{- range $role.extraEnv -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%sextraEnv names %s twice: give it one value" $at .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- if and (hasPrefix "FERMATA_" .name) (not .valueFrom) -}}
{{- fail (printf "%sextraEnv sets %s: settings stand in config, where ports, probes and times follow them" $at .name) -}}
{{- end -}}
{{- end -}}

{{- /* Memory. */ -}}
{{- $memory := dig "limits" "memory" "" ($role.resources | default dict) -}}
{{- if and $memory $role.shmSize (ge (include "fermata.bytes" $role.shmSize | float64) (include "fermata.bytes" $memory | float64)) -}}
{{- fail (printf "%sshmSize is %s and resources.limits.memory %v: what lies in /dev/shm counts as memory, so make the limit larger" $at $role.shmSize $memory) -}}
{{- end -}}
{{- end -}}

{{/* The bytes of a quantity (512Mi, 1e9, 2.5G), which may be a number. */}}
{{- define "fermata.bytes" -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- range $power, $unit := list "Ki" "Mi" "Gi" "Ti" "Pi" "Ei" -}}
{{- $bytes := 1.0 -}}
{{- range until (add $power 1 | int) -}}
{{- $bytes = mulf $bytes 1024 -}}
{{- end -}}
{{- $_ := set $units $unit $bytes -}}
{{- end -}}
{{- $_ := set $units "m" 1e-3 -}}
{{- $text := toString . -}}
{{- $unit := regexFind "([EPTGMKk]i?|m)$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit | default 1.0) | printf "%.0f" -}}
{{- end -}}

{{/* The seconds of a duration of Prometheus, as in 1m30s. */}}
{{- define "fermata.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 "w" 604800.0 "y" 31536000.0 -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9]+(ms|[smhdwy])" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get $units $unit)) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}
