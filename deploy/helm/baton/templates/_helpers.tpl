{{- /* Ports. Each pod has an address of its own, so every pod uses the same ones. */ -}}
{{- define "baton.ports" -}}
http: 8000
peers: 8001
control: 7000
controlMetrics: 7001
worker: 7100
workerMetrics: 7101
store: 7200
storeMetrics: 7201
gcs: 6379
nodeManager: 6380
redis: 6379
{{- end }}

{{- /* Names of Services begin with a letter, and so does this one, whatever the release is called. */ -}}
{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- $full = default $full .Values.fullnameOverride }}
{{- if regexMatch "^[0-9]" $full }}{{ $full = printf "%s-%s" .Chart.Name $full }}{{ end -}}
{{ $full | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Labels that select the pods of one component: (list . "router"). KubeRay sets its own values of
       app.kubernetes.io/name, so nothing is selected by that. */ -}}
{{- define "baton.selector" -}}
baton.dev/cluster: {{ include "baton.fullname" (index . 0) }}
baton.dev/component: {{ index . 1 }}
{{- end }}

{{- define "baton.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{ include "baton.selector" . }}
{{- end }}

{{- /* An image of ours: (list . .Values.images.light "baton/light"). A repository without a registry would be one of
       Docker Hub's, and somebody else's, so a registry must be named: by global.imageRegistry, images.registry, or in
       the repository itself. */ -}}
{{- define "baton.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{- $repository := default (index . 2) $image.repository }}
{{- if not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository) }}
{{- $registry := coalesce (default (dict) $root.Values.global).imageRegistry $root.Values.images.registry }}
{{- if not $registry }}
{{- fail (printf "images.registry: name the registry where you pushed %s, such as registry.example.com, or localhost for images that nodes have already (docs/operations.md, On Kubernetes, says how to build them)" $repository) }}
{{- end }}
{{- $repository = printf "%s/%s" $registry $repository }}
{{- end }}
{{- if $image.digest }}{{ $repository }}@{{ $image.digest }}
{{- else }}{{ $repository }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- define "baton.lightImage" -}}
{{ include "baton.image" (list . .Values.images.light "baton/light") }}
{{- end }}

{{- define "baton.workerImage" -}}
{{ include "baton.image" (list . .Values.images.worker (printf "baton/%s" .Values.accelerator)) }}
{{- end }}

{{- define "baton.redisImage" -}}
{{- $image := .Values.redis.image }}
{{- $registry := default $image.registry (default (dict) .Values.global).imageRegistry -}}
{{ $registry }}/{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag }}{{ end }}
{{- end }}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- /* What every pod has: (list . COMPONENT), where COMPONENT is the values of one, such as .Values.router. */ -}}
{{- define "baton.pod" -}}
{{- $root := index . 0 }}{{ $component := index . 1 -}}
serviceAccountName: {{ include "baton.serviceAccountName" $root }}
automountServiceAccountToken: {{ default false $component.mountToken }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $root.Values.security.user }}
  runAsGroup: {{ $root.Values.security.group }}
  fsGroup: {{ $root.Values.security.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with concat (default (list) (default (dict) $root.Values.global).imagePullSecrets) $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "string" . | ternary . (get (kindIs "string" . | ternary (dict) .) "name") }}
  {{- end }}
{{- end }}
{{- with $component.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $component.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $component.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* An operator's own labels of a component's pods, and annotations. Labels that select pods stay. */ -}}
{{- define "baton.podLabels" -}}
{{- $own := include "baton.labels" (list (index . 0) (index . 2)) | fromYaml -}}
{{ toYaml (mergeOverwrite (deepCopy (default (dict) (index . 1).podLabels)) $own) }}
{{- end }}

{{- define "baton.podAnnotations" -}}
{{- with .podAnnotations }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.extraEnv" -}}
{{- with .extraEnv }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.extraMounts" -}}
{{- with .extraVolumeMounts }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.extraVolumes" -}}
{{- with .extraVolumes }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.sidecars" -}}
{{- with .sidecars }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.initContainers" -}}
{{- with .initContainers }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "baton.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "baton.spread" -}}
{{- $selector := index . 1 -}}
{{- with index . 0 }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Affinity of a pool's pods: the operator's, and where workers have several pods, preferences for those to be near
       each other: (list POOL SELECTOR). */ -}}
{{- define "baton.poolAffinity" -}}
{{- $pool := index . 0 }}{{ $selector := index . 1 | fromYaml }}
{{- $affinity := deepCopy (default (dict) $pool.affinity) }}
{{- if gt (int $pool.podsPerWorker) 1 }}
{{- $terms := list }}
{{- range $pool.stageAffinity }}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" $selector) }}
{{- $terms = append $terms (dict "weight" .weight "podAffinityTerm" $term) }}
{{- end }}
{{- $key := "preferredDuringSchedulingIgnoredDuringExecution" }}
{{- $pods := default (dict) $affinity.podAffinity }}
{{- with concat $terms (default (list) (get $pods $key)) }}{{ $_ := set $pods $key . }}{{ $_ := set $affinity "podAffinity" $pods }}{{ end }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{- /* Environment: the settings of the config map and of Secrets. */ -}}
{{- define "baton.envFrom" -}}
envFrom:
  - configMapRef:
      name: {{ include "baton.fullname" . }}-config
{{- end }}

{{- define "baton.fromSecret" -}}
valueFrom:
  secretKeyRef:
    name: {{ .name }}
    key: {{ .key }}
{{- end }}

{{- define "baton.env" -}}
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /cache/huggingface
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- with .Values.model.hubTokenSecret }}{{ if .name }}
- name: HF_TOKEN
  {{- include "baton.fromSecret" . | nindent 2 }}
{{- end }}{{ end }}
{{- end }}

{{- /* The same settings as `baton serve` gives to the Ray that it starts (control_plane/ray_cluster.py). */ -}}
{{- define "baton.rayEnv" -}}
- name: RAY_worker_niceness
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: RAY_health_check_initial_delay_ms
  value: "1000"
- name: RAY_health_check_period_ms
  value: "500"
- name: RAY_health_check_timeout_ms
  value: "1000"
- name: RAY_health_check_failure_threshold
  value: "3"
- name: GRPC_ENABLE_FORK_SUPPORT
  value: "0"
# The preStop command has drained the worker. Ray's own drain would only delay the end of the pod.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "0"
# Nodes wait for a lost head as long as this, and their workers serve meanwhile. Without a store of its state, the next
# head does not know them and ends them.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: {{ .Values.ray.headLossSeconds | quote }}
{{- with .Values.ray.authTokenSecret }}{{ if .name }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  {{- include "baton.fromSecret" . | nindent 2 }}
{{- else }}
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}{{ end }}
{{- end }}

{{- /* Secret with the password of Redis: (list NAME KEY) as a dict, or nothing. Own Redis makes one if none is named. */ -}}
{{- define "baton.redisSecret" -}}
{{- $secret := .Values.redis.passwordSecret }}
{{- if $secret.name }}
name: {{ $secret.name }}
key: {{ $secret.key }}
{{- else if eq .Values.redis.mode "own" }}
name: {{ include "baton.fullname" . }}-redis
key: password
{{- end }}
{{- end }}

{{- /* File of the authority that vouches for an external Redis, and how pods come to have it. */ -}}
{{- define "baton.redisCaFile" -}}
{{- with .Values.redis }}{{ if and (eq .mode "external") .tls .caSecret.name }}/etc/baton/redis-ca/{{ .caSecret.key }}{{ end }}{{ end }}
{{- end }}

{{- define "baton.redisCaMounts" -}}
{{- if include "baton.redisCaFile" . }}
- name: redis-ca
  mountPath: /etc/baton/redis-ca
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.redisCaVolumes" -}}
{{- if include "baton.redisCaFile" . }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.caSecret.name }}
    items:
      - key: {{ .Values.redis.caSecret.key }}
        path: {{ .Values.redis.caSecret.key }}
{{- end }}
{{- end }}

{{- /* Host and port of Redis, or nothing where only the URL of a Secret says it. */ -}}
{{- define "baton.redisAddress" -}}
{{- if eq .Values.redis.mode "own" }}{{ include "baton.fullname" . }}-redis:{{ (include "baton.ports" . | fromYaml).redis }}
{{- else if and (eq .Values.redis.mode "external") .Values.redis.host }}{{ .Values.redis.host }}:{{ .Values.redis.port }}
{{- end }}
{{- end }}

{{- /* What keeps the state of Ray's head: redis, claim, or none. */ -}}
{{- define "baton.headState" -}}
{{- if ne .Values.ray.headState "auto" }}{{ .Values.ray.headState }}
{{- else if include "baton.redisAddress" . }}redis
{{- else if eq .Values.redis.mode "none" }}claim
{{- else }}none
{{- end }}
{{- end }}

{{- /* Address of the directory, for the components that use it. */ -}}
{{- define "baton.directoryEnv" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.urlSecret.name }}
- name: BATON_STORE__DIRECTORY
  {{- include "baton.fromSecret" .Values.redis.urlSecret | nindent 2 }}
{{- else if ne .Values.redis.mode "none" }}
{{- with include "baton.redisSecret" . | fromYaml }}{{ if .name }}
- name: BATON_REDIS_PASSWORD_FOR_URL
  {{- include "baton.fromSecret" . | nindent 2 }}
{{- end }}{{ end }}
{{- $password := (include "baton.redisSecret" . | fromYaml).name | empty | ternary "" ":$(BATON_REDIS_PASSWORD_FOR_URL)" }}
{{- $login := print .Values.redis.username $password }}
- name: BATON_STORE__DIRECTORY
  value: {{ .Values.redis.tls | ternary "rediss" "redis" }}://{{ with $login }}{{ . }}@{{ end }}{{ include "baton.redisAddress" . }}/0{{ with include "baton.redisCaFile" . }}?ca={{ . }}{{ end }}
{{- end }}
{{- with .Values.router.tenantSaltSecret }}{{ if .name }}
- name: BATON_ROUTER__TENANT_SALT
  {{- include "baton.fromSecret" . | nindent 2 }}
{{- end }}{{ end }}
{{- end }}

{{- define "baton.modelMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if .Values.model.volume.existingClaim }}
- name: models
  mountPath: {{ .Values.model.volume.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{- /* Files of Secrets that every process of Baton mounts: its certificate, and the operators' tokens. */ -}}
{{- define "baton.secretMounts" -}}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/baton/tls
  readOnly: true
{{- end }}
{{- if .Values.access.tokensSecret.name }}
- name: tokens
  mountPath: /etc/baton/tokens
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.secretVolumes" -}}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.access.tokensSecret }}{{ if .name }}
- name: tokens
  secret:
    secretName: {{ .name }}
    items:
      - key: {{ .key }}
        path: {{ .key }}
{{- end }}{{ end }}
{{- end }}

{{- define "baton.modelVolumes" -}}
{{- $cache := .Values.model.cache -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if eq $cache.type "hostPath" }}
  hostPath:
    path: {{ required "model.cache.hostPath: name a folder of the hosts" $cache.hostPath }}
    type: Directory
  {{- else if eq $cache.type "claim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-cache" (include "baton.fullname" .)) $cache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- end }}
{{- with .Values.model.volume.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "baton.checksums" -}}
checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- end }}

{{- /* Ranks in one pod of a pool: all of a worker, or those of some of its stages. */ -}}
{{- define "baton.podRanks" -}}
{{ div (mul .tensorParallelSize .contextParallelSize .pipelineParallelSize) .podsPerWorker }}
{{- end }}

{{- /* Shape of a pool's workers as `baton config` has it (engine.shape). */ -}}

{{- define "baton.shape" -}}
{{- $tensor := gt (int .tensorParallelSize) 1 | ternary (printf "tp%d" (int .tensorParallelSize)) "" }}
{{- $stages := gt (int .pipelineParallelSize) 1 | ternary (printf "pp%d" (int .pipelineParallelSize)) "" }}
{{- $context := gt (int .contextParallelSize) 1 | ternary (printf "cp%d" (int .contextParallelSize)) "" -}}
{{ default "1" (print $tensor $stages $context) }}
{{- end }}

{{- /* What pods of one size have in common: the shape of their workers, and how many pods each of them has. */ -}}
{{- define "baton.podSize" -}}
{{ include "baton.shape" . }}/{{ int .podsPerWorker }}
{{- end }}

{{- /* Whether the pools in use have workers of several shapes, each of which fits the pods of some groups only. */ -}}
{{- define "baton.hasUnlikeShapes" -}}
{{- $shapes := list }}
{{- range .Values.pools }}{{ if gt (int .replicas) 0 }}{{ $shapes = append $shapes (include "baton.podSize" .) }}{{ end }}{{ end -}}
{{ gt (len (uniq $shapes)) 1 | ternary "true" "" }}
{{- end }}

{{- /* Settings for the shapes: shapes by role, and Ray's labels of the groups whose pods have room for them. */ -}}
{{- define "baton.shapeSettings" -}}
{{- $root := . }}{{ $shapes := dict }}{{ $labels := dict }}
{{- range $role, $pool := .Values.pools }}
{{- $shape := include "baton.shape" $pool }}
{{- if ne $shape "1" }}{{ $_ := set $shapes $role $shape }}{{ end }}
{{- $groups := list }}
{{- range $name, $other := $root.Values.pools }}
{{- if eq (include "baton.podSize" $other) (include "baton.podSize" $pool) }}{{ $groups = append $groups $name }}{{ end }}
{{- end }}
{{- $_ := set $labels $role (dict "ray.io/node-group" (printf "in(%s)" (join "," $groups))) }}
{{- end }}
{{- if $shapes }}
BATON_CLUSTER__SHAPES: {{ toJson $shapes | quote }}
{{- end }}
{{- $asked := default (dict) (default (dict) .Values.config.cluster).node_labels }}
{{- if gt (include "baton.expertPods" . | int) 0 }}
{{- $_ := set $labels "experts" (dict "ray.io/node-group" "in(experts)") }}
{{- else if not (include "baton.hasUnlikeShapes" . | trim) }}{{ $labels = dict }}{{ end }}
{{- with mergeOverwrite $labels $asked }}
BATON_CLUSTER__NODE_LABELS: {{ toJson . | quote }}
{{- end }}
{{- end }}

{{- define "baton.drainSeconds" -}}
{{ ceil .Values.config.cluster.drain_timeout_s | int }}
{{- end }}

{{- define "baton.controlAddress" -}}
{{ include "baton.fullname" . }}-control:{{ (include "baton.ports" . | fromYaml).control }}
{{- end }}

{{- /* Pods for expert ranks of their own: as many ranks as each pool in use has, for each model that divides its experts
       over ranks. */ -}}
{{- define "baton.expertPods" -}}
{{- $ours := default (dict) .Values.config.experts }}
{{- $pods := 0 }}
{{- if .Values.models }}
{{- range $name, $model := .Values.models }}
{{- $experts := mergeOverwrite (deepCopy $ours) (default (dict) $model.experts) }}
{{- if eq (default "off" $experts.parallel) "ranks" }}
{{- $cluster := default (dict) $model.cluster }}
{{- $aggregated := int (default 0 $cluster.aggregated_workers) }}
{{- $alone := and (gt $aggregated 0) (not (hasKey $cluster "prefill_workers")) (not (hasKey $cluster "decode_workers")) }}
{{- $counts := list $aggregated (hasKey $cluster "prefill_workers" | ternary $cluster.prefill_workers (ternary 0 1 $alone)) (hasKey $cluster "decode_workers" | ternary $cluster.decode_workers (ternary 0 1 $alone)) }}
{{- range $counts }}{{ if gt (int .) 0 }}{{ $pods = add $pods $experts.ranks }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- else if eq (default "off" $ours.parallel) "ranks" }}
{{- range $role, $pool := .Values.pools }}{{ if gt (int $pool.replicas) 0 }}{{ $pods = add $pods $ours.ranks }}{{ end }}{{ end }}
{{- end }}
{{- $pods }}
{{- end }}

{{- /* How many replicas of a pool KubeRay makes at first, at least and at most, and how many serve at least: (list ROOT
       ROLE POOL). */ -}}
{{- define "baton.podLimits" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $pool := index . 2 }}
{{- $count := int $pool.replicas }}
{{- $scale := default (dict) $root.Values.config.autoscale }}
{{- $kept := $count }}
{{- if and (eq (default "off" $scale.mode) "on") (ne $role "experts") }}
{{- $kept = min $count (get $scale (printf "%s_min" $role) | default 1) }}
{{- end }}
{{- $scales := and $root.Values.ray.autoscaler.enabled (ne $role "experts") }}
first: {{ $count }}
min: {{ $scales | ternary $kept $count }}
max: {{ $scales | ternary (max $count (default 0 $pool.maxReplicas)) $count }}
kept: {{ $kept }}
{{- end }}

{{- /* Ray's resources that workers of each role ask for, of which each pod of the role's group has one. */ -}}
{{- define "baton.roleResources" -}}
{{- $asked := default (dict) (default (dict) .Values.config.cluster).node_resources }}
{{- $resources := deepCopy $asked }}
{{- range $role, $pool := .Values.pools }}
{{- $_ := set $resources $role (merge (dict (printf "baton-%s" $role) 1) (default (dict) (get $asked $role))) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "baton.routerScheme" -}}
{{ empty .Values.router.tls.existingSecret | ternary "HTTP" "HTTPS" }}
{{- end }}
