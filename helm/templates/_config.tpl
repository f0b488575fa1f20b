{{/*
The configuration of the processes. Arguments: root; role (coordinator, ranks or gateway).
Processes replace ${AILERON_REDIS_URL} and other variables by their environment's values, which come from Secrets.
*/}}
{{- define "aileron.config" -}}
{{- $own := include (printf "aileron.config.%s" .role) . | fromYaml -}}
{{- $fleet := include "aileron.fleet" . | fromYaml -}}
{{- $derived := include "aileron.config.derived" .root | fromYaml -}}
{{- $model := include "aileron.config.model" .root | fromYaml -}}
{{- $tls := include "aileron.config.tls" .root | fromYaml -}}
{{- mergeOverwrite $derived (deepCopy .root.Values.config) $own $fleet $model $tls | toYaml -}}
{{- end -}}

{{/* Widths and the first layout follow from the ranks, as with `aileron up --ranks`. */}}
{{- define "aileron.config.derived" -}}
{{- $cell := .Values.config.cell | default dict -}}
{{- $ranks := int (dig "ranks" 2 $cell) -}}
{{- $widths := $cell.widths -}}
{{- if not $widths -}}
{{- $widths = list -}}
{{- range $width := list 1 2 4 8 16 32 64 -}}
{{- if eq (mod $ranks $width) 0 }}{{ $widths = append $widths $width }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $parts := int (dig "weight_parts" 1 $cell) -}}
{{- $widest := 1 -}}
{{- range $width := $widths }}{{ $widest = max $widest (int $width) }}{{ end -}}
{{- $layout := printf "dp%d" $ranks -}}
{{- if and (gt $parts 1) (eq (mod $widest $parts) 0) -}}
{{- $group := ternary (printf "tp%d" $widest) (printf "shift%dtp%d" (div $widest $parts) $parts) (eq $widest $parts) -}}
{{- $groups := list -}}
{{- range $_ := until (int (div $ranks $widest)) }}{{ $groups = append $groups $group }}{{ end -}}
{{- $layout = join "+" $groups -}}
{{- end -}}
cell:
  ranks: {{ $ranks }}
  widths: {{ toJson $widths }}
  layout: {{ $cell.layout | default $layout }}
{{- end -}}

{{/* A model that pods download lies in a folder, and keeps its id as its name. */}}
{{- define "aileron.config.model" -}}
{{- if .Values.models.download.enabled }}
model:
  path: {{ include "aileron.modelFolder" . }}
  served_name: {{ .Values.config.model.served_name | default .Values.config.model.path }}
{{- end }}
{{- end -}}

{{/* Every process of a cell presents the certificate of one Secret, and trusts its authority. */}}
{{- define "aileron.config.tls" -}}
{{- if .Values.tls.cellSecret }}
cell_tls: {cert_file: /etc/aileron/tls/cell/tls.crt, key_file: /etc/aileron/tls/cell/tls.key, ca_file: /etc/aileron/tls/cell/ca.crt}
{{- end }}
{{- end -}}

{{/* How gateways find several cells: in Redis, or by the names of their pods. Argument: root. */}}
{{- define "aileron.fleet" -}}
{{- $root := .root -}}
{{- if include "aileron.severalCells" $root }}
{{- $name := include "aileron.fullname" $root -}}
{{- $domain := printf "%s-cells.%s.svc:8002" $name $root.Release.Namespace -}}
fleet:
  {{- if include "aileron.fleetInRedis" $root }}
  redis: {{ dig "fleet" "redis" "" $root.Values.config | default "${AILERON_REDIS_URL}/2" }}
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
{{- if and (include "aileron.severalCells" .) (or (include "aileron.hasRedis" .) (dig "fleet" "redis" "" .Values.config)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "aileron.config.coordinator" -}}
coordinator: {listen: "{{ ternary "127.0.0.1" "0.0.0.0" (eq .root.Values.gateway.placement "cell") }}:8002"}
cell: {dist_port: 29500}
admin:
  host: 0.0.0.0
  port: 8001
  {{- if .root.Values.tls.adminSecret }}
  tls_cert_file: /etc/aileron/tls/admin/tls.crt
  tls_key_file: /etc/aileron/tls/admin/tls.key
  {{- end }}
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
  metrics_listen: 0.0.0.0:8004
  {{- if $root.Values.tls.servingSecret }}
  tls_cert_file: /etc/aileron/tls/serving/tls.crt
  tls_key_file: /etc/aileron/tls/serving/tls.key
  {{- end }}
  {{- if include "aileron.keysSecret" $root }}
  keys_file: /etc/aileron/keys/keys.yaml
  {{- end }}
  {{- if and (include "aileron.hasRedis" $root) (not $set.rate_limit_storage) }}
  rate_limit_storage: ${AILERON_REDIS_URL}/0
  {{- end }}
{{- if $root.Values.batches.enabled }}
batches:
  data_dir: /var/lib/aileron/batches
  {{- if and (include "aileron.hasRedis" $root) (not (dig "batches" "storage" "" $root.Values.config)) }}
  storage: ${AILERON_REDIS_URL}/1
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

{{/* The bytes of a quantity of memory, such as 512Mi. */}}
{{- define "aileron.bytes" -}}
{{- $text := kindIs "string" . | ternary . (printf "%d" (int64 .)) -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (not $number) (not (hasKey $units $unit)) -}}
{{- fail (printf "resources.limits.memory: write %s as a number with k, M, G, Ki, Mi or Gi." $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}

{{/* A digest of the files that the pods of a cell or a gateway read at start: its change rolls them. */}}
{{- define "aileron.cellDigest" -}}
{{- $texts := list (include "aileron.config" (dict "root" . "role" "coordinator")) (include "aileron.config" (dict "root" . "role" "ranks")) (.Files.Get "scripts/cell_probe.py") -}}
{{- if eq .Values.gateway.placement "cell" -}}
{{- $texts = append $texts (include "aileron.gatewayDigest" .) -}}
{{- end -}}
{{- toJson $texts | sha256sum -}}
{{- end -}}

{{- define "aileron.gatewayDigest" -}}
{{- include "aileron.config" (dict "root" . "role" "gateway") | sha256sum -}}
{{- end -}}
