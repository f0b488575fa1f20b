{{/* The configuration of the processes. Arguments: root; role (coordinator, ranks or gateway); redis, its URL. */}}
{{- define "aileron.config" -}}
{{- $own := include (printf "aileron.config.%s" .role) . | fromYaml -}}
{{- $fleet := include "aileron.fleet" . | fromYaml -}}
{{- mergeOverwrite (deepCopy .root.Values.config) $own $fleet | toYaml -}}
{{- end -}}

{{/* How gateways find several cells: in Redis, or by the names of their pods. Arguments: root; redis. */}}
{{- define "aileron.fleet" -}}
{{- $root := .root -}}
{{- if include "aileron.severalCells" $root }}
{{- $name := include "aileron.fullname" $root -}}
{{- $domain := printf "%s-cells.%s.svc:8002" $name $root.Release.Namespace -}}
fleet:
  {{- if include "aileron.fleetInRedis" $root }}
  redis: {{ dig "fleet" "redis" "" $root.Values.config | default (printf "%s/2" .redis) }}
  advertise: "{host}.{{ $domain }}"
  {{- else }}
  cells:
    {{- range $cell := until (int $root.Values.cells) }}
    - {{ $name }}-cell-{{ $cell }}.{{ $domain }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Whether gateways know more than one cell; those in a cell's pod know that one. */}}
{{- define "aileron.severalCells" -}}
{{- $values := .Values -}}
{{- if and (eq $values.gateway.placement "deployment") (or (gt (int $values.cells) 1) (ne $values.cell.autoscaling.type "none")) -}}
yes
{{- end -}}
{{- end -}}

{{- define "aileron.fleetInRedis" -}}
{{- if and (include "aileron.severalCells" .) (or .Values.redis.enabled (dig "fleet" "redis" "" .Values.config)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "aileron.config.coordinator" -}}
coordinator: {listen: "{{ ternary "127.0.0.1" "0.0.0.0" (eq .root.Values.gateway.placement "cell") }}:8002"}
cell: {dist_port: 29500}
admin: {host: 0.0.0.0, port: 8001}
{{- end -}}

{{- define "aileron.config.ranks" -}}
coordinator: {listen: "127.0.0.1:8002"}
cell: {dist_port: 29500}
{{- end -}}

{{- define "aileron.config.gateway" -}}
{{- $root := .root -}}
{{- $name := include "aileron.fullname" $root -}}
{{- $set := $root.Values.config.gateway | default dict -}}
{{- if eq $root.Values.gateway.placement "cell" }}
coordinator: {listen: "127.0.0.1:8002"}
{{- else }}
coordinator: {listen: "{{ $name }}-cell-0.{{ $name }}-cells.{{ $root.Release.Namespace }}.svc:8002"}
{{- end }}
cell: {dist_port: 29500}
gateway:
  host: 0.0.0.0
  port: 8000
  token_listen: {{ include "aileron.tokenAddress" $root }}
  {{- if include "aileron.keysSecret" $root }}
  keys_file: /etc/aileron/keys/keys.yaml
  {{- end }}
  {{- if and $root.Values.redis.enabled (not $set.rate_limit_storage) }}
  rate_limit_storage: {{ .redis }}/0
  {{- end }}
{{- if $root.Values.batches.enabled }}
batches:
  data_dir: /var/lib/aileron/batches
  {{- if and $root.Values.redis.enabled (not (dig "batches" "storage" "" $root.Values.config)) }}
  storage: {{ .redis }}/1
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where leaders push tokens to. ZeroMQ resolves the interface's name, so ranks get the pod's address. */}}
{{- define "aileron.tokenAddress" -}}
{{- if eq .Values.gateway.placement "cell" -}}
tcp://127.0.0.1:0
{{- else if gt (dig "gateway" "processes" 1 .Values.config | int) 1 -}}
tcp://{{ .Values.gateway.podInterface }}:0
{{- else -}}
tcp://{{ .Values.gateway.podInterface }}:8003
{{- end -}}
{{- end -}}

{{/* Refuses combinations that the product cannot serve; each sentence says what to change. */}}
{{- define "aileron.check" -}}
{{- $values := .Values -}}
{{- $gateways := include "aileron.gatewaysMax" . | int -}}
{{- $config := $values.config.gateway | default dict -}}
{{- if not (dig "model" "path" "" $values.config) -}}
{{- fail "No model: set config.model.path to a Hugging Face id, or to a folder of models.volume." -}}
{{- end -}}
{{- if and (not (include "aileron.keysSecret" .)) (not $config.insecure_no_auth) -}}
{{- fail "No API keys: set auth.apiKeys (see `aileron key --help`), or config.gateway.insecure_no_auth: true to serve everyone who reaches the Service." -}}
{{- end -}}
{{- if and (include "aileron.keysSecret" .) (gt $gateways 1) (not $values.redis.enabled) (not (hasPrefix "redis" ($config.rate_limit_storage | default ""))) -}}
{{- fail "Several gateways with API keys would each count requests per minute for itself: set redis.enabled: true, or config.gateway.rate_limit_storage to a redis:// URL." -}}
{{- end -}}
{{- if and $values.batches.enabled (gt $gateways 1) (not $values.redis.enabled) (not (hasPrefix "redis" (dig "batches" "storage" "" $values.config))) -}}
{{- fail "Several gateways share batches through Redis: set redis.enabled: true, or config.batches.storage to a redis:// URL." -}}
{{- end -}}
{{- if and (eq $values.cell.autoscaling.type "keda") (not $values.metrics.serviceMonitor.enabled) -}}
{{- fail "KEDA asks Prometheus for series with the labels that a ServiceMonitor gives them: set metrics.serviceMonitor.enabled: true, or cell.autoscaling.type: hpa." -}}
{{- end -}}
{{- if eq $values.gateway.placement "cell" -}}
{{- if $values.gateway.autoscaling.enabled -}}
{{- fail "gateway.autoscaling belongs to gateway.placement: deployment; cells are scaled by cell.autoscaling." -}}
{{- end -}}
{{- if dig "fleet" "redis" "" $values.config -}}
{{- fail "config.fleet belongs to gateway.placement: deployment; a gateway in a cell's pod knows that cell alone." -}}
{{- end -}}
{{- else -}}
{{- if and (ne $values.cell.autoscaling.type "none") (not (include "aileron.fleetInRedis" .)) -}}
{{- fail "Gateways find cells that come and go in Redis: set redis.enabled: true, config.fleet.redis to a redis:// URL, or gateway.placement: cell." -}}
{{- end -}}
{{- if gt $gateways 256 -}}
{{- fail "A cell takes 256 gateways at most: lower gateway.replicas, gateway.autoscaling.maxReplicas or config.gateway.processes." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The bytes of a quantity of memory, such as 512Mi. */}}
{{- define "aileron.bytes" -}}
{{- $text := kindIs "string" . | ternary . (printf "%d" (int64 .)) -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (not $number) (not (hasKey $units $unit)) -}}
{{- fail (printf "redis.resources.limits.memory: write %s as a number with k, M, G, Ki, Mi or Gi." $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}

{{/* A digest of the files that the pods of a cell or a gateway read at start: its change rolls them. */}}
{{- define "aileron.cellDigest" -}}
{{- $texts := list (include "aileron.config" (dict "root" . "role" "coordinator" "redis" "redis")) (include "aileron.config" (dict "root" . "role" "ranks" "redis" "redis")) (.Files.Get "scripts/cell_probe.py") -}}
{{- if eq .Values.gateway.placement "cell" -}}
{{- $texts = append $texts (include "aileron.gatewayDigest" .) -}}
{{- end -}}
{{- toJson $texts | sha256sum -}}
{{- end -}}

{{- define "aileron.gatewayDigest" -}}
{{- include "aileron.config" (dict "root" . "role" "gateway" "redis" "redis") | sha256sum -}}
{{- end -}}
