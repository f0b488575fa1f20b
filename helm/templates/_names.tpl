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

{{/*
The image of a component, which may differ from `image`. Arguments: root; section, the component's values; role, gateway
or cell. On CUDA gateways apart have an image of their own, without CUDA's packages.
*/}}
{{- define "aileron.image" -}}
{{- $own := .section.image -}}
{{- $common := .root.Values.image -}}
{{- $cuda := eq (dig "cell" "device" "cpu" .root.Values.config) "cuda" -}}
{{- $slim := and (eq .role "gateway") (eq .root.Values.gateway.placement "deployment") -}}
{{- $repository := $own.repository | default $common.repository -}}
{{- $digest := $own.digest -}}
{{- if not (or $digest $own.tag $own.repository (and $slim $cuda)) -}}
{{- $digest = $common.digest -}}
{{- end -}}
{{- if $digest -}}
{{ $repository }}@{{ $digest }}
{{- else -}}
{{- $default := $common.tag | default (printf "%s%s" .root.Chart.AppVersion (ternary "-cuda" "" $cuda)) -}}
{{- if and $slim $cuda -}}
{{- $default = printf "%s-gateway" ($default | trimSuffix "-cuda") -}}
{{- end -}}
{{ $repository }}:{{ $own.tag | default $default }}
{{- end -}}
{{- end -}}

{{/* The Secret with the cell's token and the admin key: the user's, or the one that a hook makes once. */}}
{{- define "aileron.authSecret" -}}
{{- .Values.auth.existingSecret | default (include "aileron.madeSecret" .) -}}
{{- end -}}

{{- define "aileron.tokenKey" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.tokenKey }}{{ else }}token{{ end -}}
{{- end -}}

{{- define "aileron.adminKeyKey" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.adminKeyKey }}{{ else }}admin-key{{ end -}}
{{- end -}}

{{- define "aileron.viewerKeyKey" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.viewerKeyKey }}{{ else }}viewer-key{{ end -}}
{{- end -}}

{{- define "aileron.metricsKeyKey" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.metricsKeyKey }}{{ else }}metrics-key{{ end -}}
{{- end -}}

{{- define "aileron.madeSecret" -}}
{{- printf "%s-secrets" (include "aileron.fullname" .) -}}
{{- end -}}

{{/* Whether some secret is nobody's yet: then a hook makes all of them. */}}
{{- define "aileron.makesSecrets" -}}
{{- if or (not .Values.auth.existingSecret) (and .Values.redis.enabled (not .Values.redis.existingSecret)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "aileron.redisSecret" -}}
{{- .Values.redis.existingSecret | default (include "aileron.madeSecret" .) -}}
{{- end -}}

{{- define "aileron.redisKey" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.passwordKey }}{{ else }}redis-password{{ end -}}
{{- end -}}

{{/* A Redis that the chart knows: its own, or one whose URL is in a Secret. */}}
{{- define "aileron.hasRedis" -}}
{{- if or .Values.redis.enabled .Values.redis.external.existingSecret -}}
yes
{{- end -}}
{{- end -}}

{{/* Digest of the Secrets that processes read at start, where Helm can read the cluster; else nothing. */}}
{{- define "aileron.secretsDigest" -}}
{{- $root := . -}}
{{- $names := list .Values.auth.existingSecret .Values.huggingFace.existingSecret .Values.redis.external.existingSecret -}}
{{- if .Values.redis.enabled -}}
{{- $names = append $names .Values.redis.existingSecret -}}
{{- end -}}
{{- $found := list -}}
{{- range $name := compact $names -}}
{{- $found = append $found (lookup "v1" "Secret" $root.Release.Namespace $name | default dict | dig "data" dict) -}}
{{- end -}}
{{- if compact $found -}}
{{- toJson $found | sha256sum -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the file of API keys, or nothing. */}}
{{- define "aileron.keysSecret" -}}
{{- if .Values.auth.apiKeys.existingSecret -}}
{{ .Values.auth.apiKeys.existingSecret }}
{{- else if .Values.auth.apiKeys.keys -}}
{{ include "aileron.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "aileron.keysKey" -}}
{{- if .Values.auth.apiKeys.existingSecret }}{{ .Values.auth.apiKeys.key }}{{ else }}keys.yaml{{ end -}}
{{- end -}}

{{- define "aileron.batchesClaim" -}}
{{- .Values.batches.existingClaim | default (printf "%s-batches" (include "aileron.fullname" .)) -}}
{{- end -}}

{{/* The highest number of pods with gateways. */}}
{{- define "aileron.gatewayPodsMax" -}}
{{- div (include "aileron.gatewaysMax" . | int) (dig "gateway" "processes" 1 .Values.config | int) -}}
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

{{/* The folder of a downloaded model. */}}
{{- define "aileron.modelFolder" -}}
{{ .Values.models.mountPath }}/{{ .Values.config.model.path }}
{{- end -}}
