{{- define "aileron.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "aileron.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "aileron.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "aileron.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select; each object adds its component. */}}
{{- define "aileron.selector" -}}
app.kubernetes.io/name: {{ include "aileron.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "aileron.labels" -}}
{{ include "aileron.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The component whose pods hold gateways. */}}
{{- define "aileron.serving" -}}
{{- if eq .Values.gateway.placement "cell" }}cell{{ else }}gateway{{ end -}}
{{- end -}}

{{- define "aileron.image" -}}
{{- $cuda := eq (dig "cell" "device" "cpu" .Values.config) "cuda" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" $cuda)) }}
{{- end -}}
{{- end -}}

{{- define "aileron.authSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "aileron.fullname" .)) -}}
{{- end -}}

{{/* The Secret with the file of API keys, or nothing. */}}
{{- define "aileron.keysSecret" -}}
{{- if .Values.auth.apiKeys.existingSecret -}}
{{ .Values.auth.apiKeys.existingSecret }}
{{- else if .Values.auth.apiKeys.keys -}}
{{ include "aileron.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "aileron.batchesClaim" -}}
{{- .Values.batches.existingClaim | default (printf "%s-batches" (include "aileron.fullname" .)) -}}
{{- end -}}

{{/* The highest number of gateways, over all cells. */}}
{{- define "aileron.gatewaysMax" -}}
{{- $gateway := .Values.gateway -}}
{{- $processes := dig "gateway" "processes" 1 .Values.config | int -}}
{{- if eq $gateway.placement "cell" -}}
{{- mul (ternary .Values.cells .Values.cell.autoscaling.maxCells (eq .Values.cell.autoscaling.type "none")) $processes -}}
{{- else -}}
{{- mul (ternary $gateway.autoscaling.maxReplicas $gateway.replicas $gateway.autoscaling.enabled) $processes -}}
{{- end -}}
{{- end -}}
