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

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end }}{{ end }}
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

{{- define "baton.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.security.user }}
  runAsGroup: {{ .Values.security.group }}
  fsGroup: {{ .Values.security.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "baton.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
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

{{- /* Preferences for pods of the same pool to be near each other: (list TERMS SELECTOR). */ -}}
{{- define "baton.near" -}}
{{- $selector := index . 1 -}}
{{- with index . 0 }}
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range . }}
      - weight: {{ .weight }}
        podAffinityTerm:
          topologyKey: {{ .topologyKey }}
          labelSelector:
            matchLabels:
              {{- $selector | nindent 14 }}
      {{- end }}
{{- end }}
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

{{- /* Address of the directory, for the components that use it. */ -}}
{{- define "baton.directoryEnv" -}}
{{- if eq .Values.redis.mode "own" }}
- name: BATON_REDIS_PASSWORD_FOR_URL
  {{- include "baton.fromSecret" .Values.redis.passwordSecret | nindent 2 }}
- name: BATON_STORE__DIRECTORY
  value: redis://:$(BATON_REDIS_PASSWORD_FOR_URL)@{{ include "baton.fullname" . }}-redis:{{ (include "baton.ports" . | fromYaml).redis }}/0
{{- else if eq .Values.redis.mode "external" }}
- name: BATON_STORE__DIRECTORY
  {{- include "baton.fromSecret" .Values.redis.urlSecret | nindent 2 }}
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
{{- if not (include "baton.hasUnlikeShapes" . | trim) }}{{ $labels = dict }}{{ end }}
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
