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

{{- define "aileron.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "aileron.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of a pod. Arguments: root; component; section, its values; annotations, more of them. */}}
{{- define "aileron.podMetadata" -}}
labels:
  {{- $labels := merge (include "aileron.labels" .root | fromYaml) (dict "app.kubernetes.io/component" .component) -}}
  {{- mergeOverwrite (deepCopy .section.podLabels) $labels | toYaml | nindent 2 }}
{{- with mergeOverwrite (deepCopy .section.podAnnotations) (.annotations | default dict) }}
annotations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Fields of every pod of aileron. Arguments: root; component; section, its values; account, its service account if it is not
the release's.
*/}}
{{- define "aileron.podCommon" -}}
{{- $root := .root -}}
{{- $section := .section -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .account | default (include "aileron.serviceAccount" $root) }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ $root.Values.podSecurityContext | default (include "aileron.podSecurity" $root | fromYaml) | toYaml | nindent 2 }}
{{- range $key := list "runtimeClassName" "priorityClassName" }}
{{- with index $section $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" }}
{{- with index $section $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- $labels := mergeOverwrite (include "aileron.selector" $root | fromYaml) (dict "app.kubernetes.io/component" .component) -}}
{{- $affinity := $section.affinity -}}
{{- if and (not $affinity) (eq .component "gateway") $root.Values.batches.enabled $root.Values.batches.sameNode }}
# batches.sameNode: gateways share a volume that one node can mount.
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {{ toJson $labels }}}}
{{- else if $affinity }}
affinity: {{ toYaml $affinity | nindent 2 }}
{{- end }}
{{- with $section.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels)) | list | toYaml | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $section.podSpec }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A probe with the user's timings. Arguments: probe; timing. */}}
{{- define "aileron.probe" -}}
{{- mergeOverwrite .probe (.timing | default dict) | toYaml -}}
{{- end -}}

{{/* Environment of every process of aileron. Kubernetes replaces $(…) by variables that stand before. */}}
{{- define "aileron.env" -}}
- name: AILERON_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: {{ include "aileron.tokenKey" . }}}}
- {name: PYTHONUNBUFFERED, value: "1"}
{{- if .Values.redis.enabled }}
- name: AILERON_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "aileron.redisSecret" . }}, key: {{ include "aileron.redisKey" . }}}}
- name: AILERON_REDIS_URL
  value: redis://:$(AILERON_REDIS_PASSWORD)@{{ include "aileron.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379
{{- else if .Values.redis.external.existingSecret }}
- name: AILERON_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: {{ .Values.redis.external.urlKey }}}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "aileron.adminKeyEnv" -}}
- name: AILERON_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: {{ include "aileron.adminKeyKey" . }}}}
{{- end -}}

{{/* Optional: a Secret of an earlier version has none, and the port then knows the admin key alone. */}}
{{- define "aileron.readKeysEnv" -}}
- name: AILERON_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: {{ include "aileron.metricsKeyKey" . }}, optional: true}}
- name: AILERON_VIEWER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "aileron.authSecret" . }}, key: {{ include "aileron.viewerKeyKey" . }}, optional: true}}
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
{{- include "aileron.huggingFaceToken" . }}
{{- end -}}

{{- define "aileron.huggingFaceToken" -}}
{{- with .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.huggingFace.tokenKey }}}}
{{- end }}
{{- end -}}

{{/* Whether pods have a folder of models. */}}
{{- define "aileron.hasModels" -}}
{{- if or .Values.models.volume .Values.models.download.enabled -}}
yes
{{- end -}}
{{- end -}}

{{- define "aileron.engineMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- include "aileron.tlsMount" (dict "root" . "part" "cell") }}
{{- if include "aileron.hasModels" . }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* A Secret of type kubernetes.io/tls as a folder, so that a renewal reaches the process. Arguments: root; part. */}}
{{- define "aileron.tlsMount" -}}
{{- if index .root.Values.tls (printf "%sSecret" .part) }}
- {name: tls-{{ .part }}, mountPath: /etc/aileron/tls/{{ .part }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "aileron.tlsVolume" -}}
{{- with index .root.Values.tls (printf "%sSecret" .part) }}
- {name: tls-{{ $.part }}, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end -}}

{{/* An httpGet by HTTPS if the port has a certificate; kubelets do not check it. Arguments: root; part; get. */}}
{{- define "aileron.httpGet" -}}
{{- $scheme := ternary (dict "scheme" "HTTPS") dict (not (empty (index .root.Values.tls (printf "%sSecret" .part)))) -}}
{{- merge .get $scheme | toYaml -}}
{{- end -}}

{{/* Volumes of pods whose processes import vLLM. Arguments: root; claimed, the names of claims of their own. */}}
{{- define "aileron.engineVolumes" -}}
{{- $root := .root -}}
{{- $models := $root.Values.models -}}
- {name: tmp, emptyDir: {sizeLimit: 4Gi}}
{{- include "aileron.tlsVolume" (dict "root" $root "part" "cell") }}
{{- if not (has "cache" .claimed) }}
- name: cache
  {{- $root.Values.cache.volume | default (dict "emptyDir" (dict "sizeLimit" $root.Values.cache.sizeLimit)) | toYaml | nindent 2 }}
{{- end }}
{{- if $models.volume }}
- name: models
  {{- toYaml $models.volume | nindent 2 }}
{{- else if and $models.download.enabled (eq $models.download.storage "shared") }}
- {name: models, persistentVolumeClaim: {claimName: {{ include "aileron.modelsClaim" $root }}}}
{{- else if and $models.download.enabled (not (has "models" .claimed)) }}
# Files of the tokenizer and the configuration: a gateway needs no weights.
- {name: models, emptyDir: {sizeLimit: 1Gi}}
{{- end }}
{{- end -}}

{{- define "aileron.modelsClaim" -}}
{{- .Values.models.download.existingClaim | default (printf "%s-models" (include "aileron.fullname" .)) -}}
{{- end -}}

{{- define "aileron.gatewayVolumes" -}}
{{- include "aileron.tlsVolume" (dict "root" . "part" "serving") }}
{{- with include "aileron.keysSecret" . }}
- {name: keys, secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: {{ include "aileron.keysKey" $ }}, path: keys.yaml}]}}
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
  image: {{ include "aileron.image" (dict "root" $root "section" $gateway "role" "gateway") }}
  imagePullPolicy: {{ $gateway.image.pullPolicy | default $root.Values.image.pullPolicy }}
  command: [aileron, gateway, --config, /etc/aileron/{{ .file }}]
  ports:
    - {name: http, containerPort: 8000}
    {{- if hasSuffix ":8003" (include "aileron.tokenAddress" $root) }}
    - {name: tokens, containerPort: 8003}
    {{- end }}
    {{- range $number := until (dig "gateway" "processes" 1 $root.Values.config | int) }}
    - {name: metrics-{{ $number }}, containerPort: {{ add 8004 $number }}}
    {{- end }}
  env:
    {{- include "aileron.env" $root | nindent 4 }}
    {{- include "aileron.engineEnv" $root | nindent 4 }}
    {{- with $gateway.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $gateway.extraEnvFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/{{ .file }}, subPath: {{ .file }}, readOnly: true}
    {{- include "aileron.engineMounts" $root | nindent 4 }}
    {{- include "aileron.tlsMount" (dict "root" $root "part" "serving") | nindent 4 }}
    {{- if include "aileron.keysSecret" $root }}
    - {name: keys, mountPath: /etc/aileron/keys, readOnly: true}
    {{- end }}
    {{- if $root.Values.batches.enabled }}
    - {name: batches, mountPath: /var/lib/aileron/batches}
    {{- end }}
    {{- with $gateway.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $health := include "aileron.httpGet" (dict "root" $root "part" "serving" "get" (dict "path" "/health" "port" "http")) | fromYaml }}
  {{- $ready := include "aileron.httpGet" (dict "root" $root "part" "serving" "get" (dict "path" "/ready" "port" "http")) | fromYaml }}
  startupProbe:
    {{- $probe := dict "httpGet" $health "periodSeconds" 5 "failureThreshold" (div (add $gateway.startupSeconds 4) 5) }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $gateway.probes.startup) | nindent 4 }}
  # True through a switch; false while the gateway drains or its cell serves no layout.
  readinessProbe:
    {{- $probe = dict "httpGet" $ready "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 2 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $gateway.probes.readiness) | nindent 4 }}
  livenessProbe:
    {{- $probe = dict "httpGet" $health "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $gateway.probes.liveness) | nindent 4 }}
  lifecycle:
    # Meanwhile the Service stops sending connections; then SIGTERM drains the open requests.
    preStop: {exec: {command: [sleep, "{{ $gateway.preStopSeconds }}"]}}
  resources: {{ toYaml $gateway.resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}

{{/* The coordinator's container. Arguments: root; sidecar, true if it ends after the gateway. */}}
{{- define "aileron.coordinatorContainer" -}}
{{- $root := .root -}}
{{- $coordinator := $root.Values.cell.coordinator -}}
- name: coordinator
  image: {{ include "aileron.image" (dict "root" $root "section" $root.Values.cell "role" "cell") }}
  imagePullPolicy: {{ $root.Values.cell.image.pullPolicy | default $root.Values.image.pullPolicy }}
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
    {{- with $coordinator.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $coordinator.extraEnvFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/coordinator.yaml, subPath: coordinator.yaml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- include "aileron.tlsMount" (dict "root" $root "part" "admin") | nindent 4 }}
    {{- include "aileron.tlsMount" (dict "root" $root "part" "cell") | nindent 4 }}
    {{- with $coordinator.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $health := include "aileron.httpGet" (dict "root" $root "part" "admin" "get" (dict "path" "/health" "port" "admin")) | fromYaml }}
  startupProbe:
    {{- $probe := dict "httpGet" $health "periodSeconds" 2 "failureThreshold" 60 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $coordinator.probes.startup) | nindent 4 }}
  readinessProbe:
    {{- $probe = dict "httpGet" $health "periodSeconds" 5 "timeoutSeconds" 3 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $coordinator.probes.readiness) | nindent 4 }}
  livenessProbe:
    {{- $probe = dict "httpGet" $health "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $coordinator.probes.liveness) | nindent 4 }}
  resources: {{ toYaml $coordinator.resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}

{{/* Resources of the container of all ranks: by their number, with the user's laid over. */}}
{{- define "aileron.ranksResources" -}}
{{- $cell := (include "aileron.config.derived" . | fromYaml).cell -}}
{{- $ranks := int $cell.ranks -}}
{{- $cuda := eq (dig "cell" "device" "cpu" .Values.config) "cuda" -}}
{{- $cores := ternary 4 1 $cuda -}}
{{- $memory := ternary (list 32 64) (list 3 4) $cuda -}}
{{- $requests := dict "cpu" (mul $ranks $cores | toString) "memory" (printf "%dGi" (mul $ranks (first $memory))) -}}
{{- $limits := dict "cpu" (mul $ranks $cores 2 | toString) "memory" (printf "%dGi" (mul $ranks (last $memory))) -}}
{{- $resources := mergeOverwrite (dict "requests" $requests "limits" $limits) (deepCopy .Values.cell.ranks.resources) -}}
{{- if and $cuda .Values.cell.gpuResource -}}
{{- $each := dig "cell" "ranks_per_device" 1 .Values.config | int -}}
{{- $gpus := dict .Values.cell.gpuResource (div (sub (add $ranks $each) 1) $each | toString) -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" (deepCopy $gpus)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The size of the ranks' /dev/shm. */}}
{{- define "aileron.shmSize" -}}
{{- $ranks := (include "aileron.config.derived" . | fromYaml).cell.ranks | int -}}
{{- $each := ternary 4096 512 (eq (dig "cell" "device" "cpu" .Values.config) "cuda") -}}
{{- .Values.cell.shmSize | default (printf "%dMi" (mul $ranks $each)) -}}
{{- end -}}

{{/* The container of all ranks, with the same arguments. */}}
{{- define "aileron.ranksContainer" -}}
{{- $root := .root -}}
{{- $cell := $root.Values.cell -}}
{{- $ranks := $cell.ranks -}}
- name: ranks
  image: {{ include "aileron.image" (dict "root" $root "section" $cell "role" "cell") }}
  imagePullPolicy: {{ $cell.image.pullPolicy | default $root.Values.image.pullPolicy }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  command: [aileron, rank, --config, /etc/aileron/ranks.yaml]
  env:
    {{- include "aileron.env" $root | nindent 4 }}
    {{- include "aileron.adminKeyEnv" $root | nindent 4 }}
    {{- include "aileron.engineEnv" $root | nindent 4 }}
    # All ranks of a cell are in this pod, and NCCL listens to nobody else.
    - {name: NCCL_SOCKET_IFNAME, value: lo}
    {{- if $root.Values.tls.adminSecret }}
    # Where the probe finds the coordinator.
    - {name: AILERON_ADMIN_URL, value: "https://127.0.0.1:8001"}
    {{- end }}
    {{- with $ranks.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $ranks.extraEnvFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/aileron/ranks.yaml, subPath: ranks.yaml, readOnly: true}
    - {name: scripts, mountPath: /etc/aileron/scripts, readOnly: true}
    - {name: shm, mountPath: /dev/shm}
    {{- include "aileron.engineMounts" $root | nindent 4 }}
    {{- with $ranks.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $ready := dict "command" (list "python" "-P" "/etc/aileron/scripts/cell_probe.py" "ready") }}
  {{- $live := dict "command" (list "python" "-P" "/etc/aileron/scripts/cell_probe.py" "live") }}
  startupProbe:
    {{- $probe := dict "exec" $ready "periodSeconds" 10 "timeoutSeconds" 8 "failureThreshold" (div (add $cell.startupSeconds 9) 10) }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $ranks.probes.startup) | nindent 4 }}
  readinessProbe:
    {{- $probe = dict "exec" $ready "periodSeconds" 10 "timeoutSeconds" 8 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $ranks.probes.readiness) | nindent 4 }}
  # The coordinator cuts out silent ranks; only a cell without any rank restarts.
  livenessProbe:
    {{- $probe = dict "exec" $live "periodSeconds" 30 "timeoutSeconds" 8 "failureThreshold" 10 }}
    {{- include "aileron.probe" (dict "probe" $probe "timing" $ranks.probes.liveness) | nindent 4 }}
  resources: {{ include "aileron.ranksResources" $root | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}

{{/* Fetches the model's files, or waits for them, before what needs them. Arguments: root; section; role; files. */}}
{{- define "aileron.modelContainer" -}}
{{- $root := .root -}}
{{- $download := $root.Values.models.download -}}
- name: model
  image: {{ include "aileron.image" (dict "root" $root "section" .section "role" .role) }}
  imagePullPolicy: {{ .section.image.pullPolicy | default $root.Values.image.pullPolicy }}
  command: [python, -P, /etc/aileron/scripts/fetch_model.py, {{ .files }}]
  env:
    - {name: MODEL_ID, value: {{ $root.Values.config.model.path | quote }}}
    - {name: MODEL_REVISION, value: {{ $download.revision | quote }}}
    - {name: MODEL_FOLDER, value: {{ include "aileron.modelFolder" $root }}}
    - {name: WAIT_SECONDS, value: {{ $download.timeoutSeconds | quote }}}
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- include "aileron.huggingFaceToken" $root | nindent 4 }}
    {{- with $root.Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    - {name: scripts, mountPath: /etc/aileron/scripts, readOnly: true}
    - {name: models, mountPath: {{ $root.Values.models.mountPath }}}
    - {name: tmp, mountPath: /tmp}
  resources: {{ toYaml $root.Values.jobs.resources | nindent 4 }}
  securityContext: {{ include "aileron.containerSecurity" $root | nindent 4 }}
{{- end -}}
