{{- define "loralane.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods; a Deployment's may never change. Argument: [root, component]. */}}
{{- define "loralane.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "loralane.labels" -}}
{{- $root := index . 0 -}}
{{ include "loralane.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "loralane.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "loralane.fullname" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* Whether engines run in pods of their own. */}}
{{- define "loralane.hasEngines" -}}
{{- if and .Values.engine.enabled (not .Values.cluster.ray.enabled) }}true{{ end -}}
{{- end -}}

{{/* The domain of the engines' pods: each is POD.DOMAIN. */}}
{{- define "loralane.engineDomain" -}}
{{- printf "%s-engine.%s.svc.%s" (include "loralane.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{/* The number of engines that there may be. */}}
{{- define "loralane.engineCount" -}}
{{- if .Values.engine.keda.enabled -}}
{{- .Values.engine.keda.maxReplicas -}}
{{- else if .Values.engine.autoscaling.enabled -}}
{{- .Values.engine.autoscaling.maxReplicas -}}
{{- else -}}
{{- .Values.engine.replicas -}}
{{- end -}}
{{- end -}}

{{/* The file of gateways: what the chart knows, and above it what `config` says. */}}
{{- define "loralane.gatewayConfig" -}}
{{- $tls := dict "ca" "/run/loralane/tls/ca.crt" "certificate" "/run/loralane/tls/tls.crt" "key" "/run/loralane/tls/tls.key" -}}
{{- $engine := deepCopy .Values.engineConfig -}}
{{- if include "loralane.hasEngines" . -}}
{{- $addresses := list -}}
{{- range $i := until (int (include "loralane.engineCount" .)) -}}
{{- $addresses = append $addresses (printf "%s-engine-%d.%s:%d" (include "loralane.fullname" $) $i (include "loralane.engineDomain" $) (int $.Values.engine.port)) -}}
{{- end -}}
{{- $engine = dict "addresses" $addresses "tls" $tls -}}
{{- end -}}
{{- $admin := dict "keys" (list "${ADMIN_KEY}") "metrics_keys" (list "${METRICS_KEY}") -}}
{{- if .Values.gateway.separateAdmin -}}
{{- $admin = merge $admin (dict "host" "0.0.0.0" "port" 8001 "grpc_port" 50052) -}}
{{- end -}}
{{- $base := dict
  "model" .Values.model
  "engine" $engine
  "lanes" .Values.lanes
  "gateways" (int .Values.gateway.processes)
  "adapters" (dict "roots" (list "/srv/loralane/adapters") "cache" "/srv/loralane/fetched")
  "batches" (dict "storage" "file:///srv/loralane/files")
  "limits" (dict "replicas" (int (ternary .Values.gateway.autoscaling.maxReplicas .Values.gateway.replicas .Values.gateway.autoscaling.enabled)))
  "http" (dict "host" "0.0.0.0" "port" 8000 "drain_seconds" (max 0 (sub (int .Values.gateway.terminationGracePeriodSeconds) 35)))
  "grpc" (dict "host" "0.0.0.0" "port" 50051)
  "admin" $admin
-}}
{{- toYaml (mergeOverwrite $base (deepCopy .Values.config)) -}}
{{- end -}}

{{/* The file of engines. */}}
{{- define "loralane.engineConfig" -}}
{{- $tls := dict "ca" "/run/loralane/tls/ca.crt" "certificate" "/run/loralane/tls/tls.crt" "key" "/run/loralane/tls/tls.key" -}}
{{- $http := dict "drain_seconds" (max 0 (sub (int .Values.engine.terminationGracePeriodSeconds) 30)) -}}
{{- toYaml (dict "model" .Values.model "lanes" .Values.lanes "http" $http "engine" (merge (dict "tls" $tls) (deepCopy .Values.engineConfig))) -}}
{{- end -}}

{{- define "loralane.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "loralane.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Fields of a pod's spec that say where it runs. Argument: gateway or engine values. */}}
{{- define "loralane.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
