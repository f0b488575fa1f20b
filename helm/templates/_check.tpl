{{/* Refuses combinations that the product cannot serve; each sentence says what to change. */}}
{{- define "aileron.check" -}}
{{- include "aileron.checkSecrets" . -}}
{{- include "aileron.checkGroups" . -}}
{{- include "aileron.checkModel" . -}}
{{- include "aileron.checkMemory" . -}}
{{- include "aileron.checkBatches" . -}}
{{- include "aileron.checkEgress" . -}}
{{- include "aileron.checkScaling" . -}}
{{- $values := .Values -}}
{{- $gateways := include "aileron.gatewaysMax" . | int -}}
{{- $config := $values.config.gateway | default dict -}}
{{- if not (dig "model" "path" "" $values.config) -}}
{{- fail "No model: set config.model.path to a Hugging Face id, or to a folder of models.volume." -}}
{{- end -}}
{{- if and (not (include "aileron.keysSecret" .)) (not $config.insecure_no_auth) -}}
{{- fail "No API keys: set auth.apiKeys (see `aileron key --help`), or config.gateway.insecure_no_auth: true to serve everyone who reaches the Service." -}}
{{- end -}}
{{- if and (include "aileron.keysSecret" .) (gt $gateways 1) (not (include "aileron.hasRedis" .)) (not (regexMatch "^(redis|\\$\\{)" ($config.rate_limit_storage | default ""))) -}}
{{- fail "Several gateways with API keys would each count requests per minute for itself: set redis.enabled: true, redis.external.existingSecret, or config.gateway.rate_limit_storage to a redis:// URL." -}}
{{- end -}}
{{- if and $values.batches.enabled (gt $gateways 1) (not (include "aileron.hasRedis" .)) (not (regexMatch "^(redis|\\$\\{)" (dig "batches" "storage" "" $values.config))) -}}
{{- fail "Several gateways share batches through Redis: set redis.enabled: true, redis.external.existingSecret, or config.batches.storage to a redis:// URL." -}}
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
{{- fail "Gateways find cells that come and go in Redis: set redis.enabled: true, redis.external.existingSecret, config.fleet.redis to a redis:// URL, or gateway.placement: cell." -}}
{{- end -}}
{{- if gt $gateways 256 -}}
{{- fail "A cell takes 256 gateways at most: lower gateway.replicas, gateway.autoscaling.maxReplicas or config.gateway.processes." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "aileron.checkSecrets" -}}
{{- $values := .Values -}}
{{- if and (not $values.secrets.generate) (not $values.auth.existingSecret) -}}
{{- fail (printf "secrets.generate is false, so name a Secret with the keys %s and %s in auth.existingSecret." $values.auth.tokenKey $values.auth.adminKeyKey) -}}
{{- end -}}
{{- if and $values.redis.enabled (not $values.secrets.generate) (not $values.redis.existingSecret) -}}
{{- fail (printf "secrets.generate is false, so name a Secret with the key %s in redis.existingSecret." $values.redis.passwordKey) -}}
{{- end -}}
{{- if and $values.redis.enabled $values.redis.external.existingSecret -}}
{{- fail "redis.enabled and redis.external.existingSecret exclude each other: the release uses one Redis." -}}
{{- end -}}
{{- end -}}

{{/* What `parse_layout` refuses: groups of more or fewer ranks than there are, or of widths that are not prepared. */}}
{{- define "aileron.checkGroups" -}}
{{- $cell := (include "aileron.config.derived" . | fromYaml).cell -}}
{{- $given := .Values.config.cell | default dict -}}
{{- $ranks := int $cell.ranks -}}
{{- $count := 0 -}}
{{- range $part := splitList "+" $cell.layout -}}
{{- if hasPrefix "pp" $part -}}
{{- if and (ne (dig "device" "cpu" $given) "cpu") (contains "tp" $part) -}}
{{- fail (printf "config.cell.layout %s has stages of several ranks, which only CPU ranks run yet: name another layout." $cell.layout) -}}
{{- else if gt (int (dig "weight_parts" 1 $given)) 1 -}}
{{- fail (printf "config.cell.layout %s has a pipeline group, which needs all of the weights on each rank: name another layout, or leave out config.cell.weight_parts." $cell.layout) -}}
{{- end -}}
{{- end -}}
{{- $numbers := regexFindAll "[0-9]+" $part -1 -}}
{{- $width := 1 -}}
{{- range $number := $numbers }}{{ $width = mul $width (int $number) }}{{ end -}}
{{- $count = add $count $width -}}
{{- $stage := ternary (last $numbers) "1" (and (hasPrefix "pp" $part) (contains "tp" $part)) -}}
{{- if and (ne $stage "1") (not (has $stage (splitList "," (join "," $cell.widths)))) -}}
{{- fail (printf "config.cell.layout %s has stages of %s ranks: add %s to config.cell.widths, or name another layout." $cell.layout $stage $stage) -}}
{{- end -}}
{{- $wide := and (not (hasPrefix "dp" $part)) (not (hasPrefix "off" $part)) (gt (int $width) 1) -}}
{{- if and $wide (not (has (toString $width) (splitList "," (join "," $cell.widths)))) -}}
{{- fail (printf "config.cell.layout %s has a group of %d ranks: add %d to config.cell.widths, or name another layout." $cell.layout $width $width) -}}
{{- end -}}
{{- end -}}
{{- if ne (int $count) $ranks -}}
{{- fail (printf "config.cell.layout %s has %d ranks, but config.cell.ranks is %d: leave out the layout, or name one of %d ranks, such as dp%d." $cell.layout (int $count) $ranks $ranks $ranks) -}}
{{- end -}}
{{- range $width := $cell.widths -}}
{{- if gt (int $width) $ranks -}}
{{- fail (printf "config.cell.widths has %d, but config.cell.ranks is %d: remove that width, or add ranks." (int $width) $ranks) -}}
{{- else if ne (mod $ranks (int $width)) 0 -}}
{{- fail (printf "config.cell.widths has %d, and config.cell.ranks %d cannot be divided into groups of %d: remove that width, or name another number of ranks." (int $width) $ranks (int $width)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "aileron.checkModel" -}}
{{- $path := dig "model" "path" "" .Values.config -}}
{{- $models := .Values.models -}}
{{- $folder := hasPrefix "/" $path -}}
{{- if and $path (not $folder) .Values.huggingFace.offline (not $models.download.enabled) -}}
{{- fail (printf "config.model.path %s is a Hugging Face id, and huggingFace.offline is true: set models.download.enabled: true, huggingFace.offline: false, or a folder of models.volume." $path) -}}
{{- end -}}
{{- if and $models.download.enabled $folder -}}
{{- fail (printf "models.download needs a Hugging Face id in config.model.path, and %s is a folder: name the id, or set models.download.enabled: false." $path) -}}
{{- end -}}
{{- if and $models.download.enabled $models.volume -}}
{{- fail "models.volume and models.download exclude each other: set one of them." -}}
{{- end -}}
{{- if and (hasPrefix (printf "%s/" $models.mountPath) $path) (not $models.volume) -}}
{{- $mounts := list -}}
{{- range $mount := concat .Values.cell.ranks.extraVolumeMounts .Values.gateway.extraVolumeMounts }}{{ $mounts = append $mounts $mount.mountPath }}{{ end -}}
{{- if not (has $models.mountPath $mounts) -}}
{{- fail (printf "config.model.path %s is below models.mountPath, where nothing is mounted: set models.volume, such as persistentVolumeClaim: {claimName: models}." $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Host memory: a CUDA process alone takes some GiB, and a container without it is killed while it loads. */}}
{{- define "aileron.checkMemory" -}}
{{- $cell := (include "aileron.config.derived" . | fromYaml).cell -}}
{{- if eq (dig "cell" "device" "cpu" .Values.config) "cuda" -}}
{{- $limit := (include "aileron.ranksResources" . | fromYaml).limits.memory -}}
{{- $needed := mul (int $cell.ranks) 8 -}}
{{- if lt (include "aileron.bytes" $limit | float64) (mulf $needed 1073741824.0) -}}
{{- fail (printf "cell.ranks.resources.limits.memory is %v for %d GPU ranks: give each at least 8Gi of host memory, so %dGi, or leave it out." $limit (int $cell.ranks) $needed) -}}
{{- end -}}
{{- $shm := include "aileron.shmSize" . -}}
{{- if lt (include "aileron.bytes" $shm | float64) (mulf $cell.ranks 1073741824.0) -}}
{{- fail (printf "cell.shmSize is %s for %d GPU ranks: give NCCL at least 1Gi for each rank, so %dGi, or leave it out." $shm (int $cell.ranks) (int $cell.ranks)) -}}
{{- end -}}
{{- end -}}
{{- $limit := (include "aileron.ranksResources" . | fromYaml).limits.memory -}}
{{- if gt (mulf (include "aileron.bytes" (include "aileron.shmSize" .) | float64) 2.0) (include "aileron.bytes" $limit | float64) -}}
{{- fail (printf "cell.shmSize is %s, which counts against the ranks' memory limit of %v: set cell.ranks.resources.limits.memory to twice that or more." (include "aileron.shmSize" .) $limit) -}}
{{- end -}}
{{- end -}}

{{- define "aileron.checkBatches" -}}
{{- $batches := .Values.batches -}}
{{- if and $batches.enabled (not $batches.existingClaim) (gt (int (include "aileron.gatewayPodsMax" .)) 1) -}}
{{- if and (has "ReadWriteOncePod" $batches.accessModes) (not (has "ReadWriteMany" $batches.accessModes)) -}}
{{- fail "batches.accessModes ReadWriteOncePod is for one pod, and there are several gateways: use ReadWriteMany, or gateway.replicas: 1." -}}
{{- end -}}
{{- if not (or (has "ReadWriteMany" $batches.accessModes) $batches.sameNode) -}}
{{- fail "Several gateways write batches to one volume: batches.accessModes needs ReadWriteMany (a file share's storage class), or set batches.sameNode: true to keep all gateways on one node, or gateway.replicas: 1." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Addresses in the configuration that the network policies would cut off. */}}
{{- define "aileron.checkEgress" -}}
{{- $root := . -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $addresses := dict -}}
{{- with dig "tracing" "endpoint" "" .Values.config -}}
{{- $port := regexFind ":[0-9]+" (urlParse .).host | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https" .)) -}}
{{- $_ := set $addresses "config.tracing.endpoint" $port -}}
{{- end -}}
{{- range $name, $url := dict "config.gateway.rate_limit_storage" (dig "gateway" "rate_limit_storage" "" .Values.config) "config.batches.storage" (dig "batches" "storage" "" .Values.config) "config.fleet.redis" (dig "fleet" "redis" "" .Values.config) -}}
{{- if hasPrefix "redis" $url -}}
{{- $_ := set $addresses $name (regexFind ":[0-9]+" (urlParse $url).host | trimPrefix ":" | default "6379") -}}
{{- end -}}
{{- end -}}
{{- range $name, $port := $addresses -}}
{{- $open := false -}}
{{- range $rule := $root.Values.networkPolicy.extraEgress -}}
{{- if not $rule.ports }}{{ $open = true }}{{ end -}}
{{- range $each := $rule.ports -}}
{{- if or (not $each.port) (eq (toString $each.port) $port) (and $each.endPort (ge (int $port) (int $each.port)) (le (int $port) (int $each.endPort))) }}{{ $open = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not $open -}}
{{- fail (printf "The network policies let nothing out to %s: add a rule with port %s to networkPolicy.extraEgress, such as {to: [{namespaceSelector: {}}], ports: [{port: %s, protocol: TCP}]}." $name $port $port) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.external.existingSecret (not .Values.networkPolicy.extraEgress) -}}
{{- fail "The network policies let nothing out to the Redis of redis.external: add a rule with its address and port to networkPolicy.extraEgress." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "aileron.checkScaling" -}}
{{- $gateway := .Values.gateway.autoscaling -}}
{{- if and $gateway.enabled (gt (int $gateway.minReplicas) (int $gateway.maxReplicas)) -}}
{{- fail "gateway.autoscaling.minReplicas is above maxReplicas: lower it." -}}
{{- end -}}
{{- $cell := .Values.cell.autoscaling -}}
{{- if and (ne $cell.type "none") (gt (int $cell.minCells) (int $cell.maxCells)) -}}
{{- fail "cell.autoscaling.minCells is above maxCells: lower it." -}}
{{- end -}}
{{- end -}}
