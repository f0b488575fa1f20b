{{- define "aileron.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "aileron.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Fields of every pod of aileron. */}}
{{- define "aileron.podCommon" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ include "aileron.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* Arguments: the section with nodeSelector and its like. */}}
{{- define "aileron.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $ $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "aileron.env" -}}
- name: AILERON_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: token}}
- {name: PYTHONUNBUFFERED, value: "1"}
{{- end -}}

{{- define "aileron.adminKeyEnv" -}}
- name: AILERON_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: admin-key}}
{{- end -}}

{{/* Optional: a Secret of an earlier version has none, and the port then knows the admin key alone. */}}
{{- define "aileron.readKeysEnv" -}}
- name: AILERON_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: metrics-key, optional: true}}
- name: AILERON_VIEWER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: viewer-key, optional: true}}
{{- end -}}

{{/* For processes that import vLLM: they write only to the cache. */}}
{{- define "aileron.engineEnv" -}}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
{{- if .Values.huggingFace.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end -}}

{{- define "aileron.engineMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .Values.models.volume }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "aileron.engineVolumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 4Gi}}
- name: cache
  {{- .Values.cache.volume | default (dict "emptyDir" (dict "sizeLimit" .Values.cache.sizeLimit)) | toYaml | nindent 2 }}
{{- with .Values.models.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "aileron.gatewayVolumes" -}}
{{- with include "aileron.keysSecret" . }}
- {name: keys, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.batches.enabled }}
- {name: batches, persistentVolumeClaim: {claimName: {{ include "aileron.batchesClaim" . }}}}
{{- end }}
{{- end -}}

{{/* The container of a gateway. Arguments: root; file, its configuration in /etc/aileron. */}}
{{- define "aileron.gatewayContainer" -}}
{{- $root := .root -}}
{{- $gateway := $root.Values.gateway -}}
- name: gateway
  image: {{ include "aileron.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [aileron, gateway, --config, /etc/aileron/{{ .file }}]
  ports:
    - {name: http, containerPort: 8000}
    {{- if hasSuffix ":8003" (include "aileron.tokenAddress" $root) }}
    - {name: tokens, containerPort: 8003}
    {{- end }}
  env:
    {{- include "aileron.env" $root | nindent 4 }}
    {{- include "aileron.engineEnv" $root | nindent 4 }}
    {{- with $gateway.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/{{ .file }}, subPath: {{ .file }}, readOnly: true}
    {{- include "aileron.engineMounts" $root | nindent 4 }}
    {{- if include "aileron.keysSecret" $root }}
    - {name: keys, mountPath: /etc/aileron/keys, readOnly: true}
    {{- end }}
    {{- if $root.Values.batches.enabled }}
    - {name: batches, mountPath: /var/lib/aileron/batches}
    {{- end }}
  startupProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 5
    failureThreshold: {{ div (add $gateway.startupSeconds 4) 5 }}
  # True through a switch; false while the gateway drains or its cell serves no layout.
  readinessProbe:
    httpGet: {path: /ready, port: http}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  livenessProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  lifecycle:
    # Meanwhile the Service stops sending connections; then SIGTERM drains the open requests.
    preStop: {exec: {command: [sleep, "{{ $gateway.preStopSeconds }}"]}}
  resources: {{ toYaml $gateway.resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}

{{/* The coordinator's container. Arguments: root; sidecar, true if it ends after the gateway. */}}
{{- define "aileron.coordinatorContainer" -}}
{{- $root := .root -}}
- name: coordinator
  image: {{ include "aileron.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  command: [aileron, coordinator, --config, /etc/aileron/coordinator.yaml]
  ports:
    - {name: admin, containerPort: 8001}
    {{- if not .sidecar }}
    - {name: grpc, containerPort: 8002}
    {{- end }}
  env:
    {{- include "aileron.env" $root | nindent 4 }}
    {{- include "aileron.adminKeyEnv" $root | nindent 4 }}
    {{- include "aileron.readKeysEnv" $root | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/coordinator.yaml, subPath: coordinator.yaml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
  startupProbe:
    httpGet: {path: /health, port: admin}
    periodSeconds: 2
    failureThreshold: 60
  readinessProbe:
    httpGet: {path: /health, port: admin}
    periodSeconds: 5
    timeoutSeconds: 3
  livenessProbe:
    httpGet: {path: /health, port: admin}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources: {{ toYaml $root.Values.cell.coordinator.resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}

{{/* The container of all ranks, with the same arguments. */}}
{{- define "aileron.ranksContainer" -}}
{{- $root := .root -}}
{{- $cell := $root.Values.cell -}}
{{- $resources := deepCopy $cell.ranks.resources -}}
{{- if eq (dig "cell" "device" "cpu" $root.Values.config) "cuda" -}}
{{- $each := dig "cell" "ranks_per_device" 1 $root.Values.config | int -}}
{{- $needed := div (sub (add (dig "cell" "ranks" 2 $root.Values.config) $each) 1) $each -}}
{{- $gpus := dict "nvidia.com/gpu" ($needed | toString) -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" (deepCopy $gpus)) -}}
{{- end -}}
- name: ranks
  image: {{ include "aileron.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  command: [aileron, rank, --config, /etc/aileron/ranks.yaml]
  env:
    {{- include "aileron.env" $root | nindent 4 }}
    {{- include "aileron.adminKeyEnv" $root | nindent 4 }}
    {{- include "aileron.engineEnv" $root | nindent 4 }}
    {{- with $cell.ranks.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/ranks.yaml, subPath: ranks.yaml, readOnly: true}
    - {name: scripts, mountPath: /etc/aileron/scripts, readOnly: true}
    - {name: shm, mountPath: /dev/shm}
    {{- include "aileron.engineMounts" $root | nindent 4 }}
  startupProbe:
    exec: {command: [python, -P, /etc/aileron/scripts/cell_probe.py, ready]}
    periodSeconds: 10
    timeoutSeconds: 8
    failureThreshold: {{ div (add $cell.startupSeconds 9) 10 }}
  readinessProbe:
    exec: {command: [python, -P, /etc/aileron/scripts/cell_probe.py, ready]}
    periodSeconds: 10
    timeoutSeconds: 8
  # The coordinator cuts out silent ranks; only a cell without any rank restarts.
  livenessProbe:
    exec: {command: [python, -P, /etc/aileron/scripts/cell_probe.py, live]}
    periodSeconds: 30
    timeoutSeconds: 8
    failureThreshold: 10
  resources: {{ toYaml $resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}
