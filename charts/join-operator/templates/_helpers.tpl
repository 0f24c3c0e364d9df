{{- /* Labels of every object; selectors are by app.kubernetes.io/name alone. */ -}}
{{- define "join.labels" -}}
app.kubernetes.io/part-of: join-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "join.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A file that names the operator's namespaces as in config/, as it is installed
       here. The manager does the same with the policies that it expects to find
       (config/policies, Manifests). */ -}}
{{- define "join.policies" -}}
{{- $text := .file -}}
{{- $text = $text | replace "join-system" .root.Release.Namespace -}}
{{- $text = $text | replace "join-keys" .root.Values.namespaces.keys -}}
{{- $text | replace "join-trust" .root.Values.namespaces.trust -}}
{{- end -}}

{{- /* RBAC has accounts and roles of such names too: only namespaces are others. */ -}}
{{- define "join.rbac" -}}
{{- $text := .file -}}
{{- $text = $text | replace "namespace: join-system" (printf "namespace: %s" .root.Release.Namespace) -}}
{{- $text = $text | replace "namespace: join-keys" (printf "namespace: %s" .root.Values.namespaces.keys) -}}
{{- $text | replace "namespace: join-trust" (printf "namespace: %s" .root.Values.namespaces.trust) -}}
{{- end -}}

{{- /* What pods have in common. */ -}}
{{- define "join.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "join.spread" -}}
topologySpreadConstraints:
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {app.kubernetes.io/name: {{ . }}}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {app.kubernetes.io/name: {{ . }}}}
{{- end -}}

{{- define "join.container" -}}
image: {{ include "join.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "join.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "join.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: {{ .name }}}}
{{- end -}}

{{- /* The Secret of a database's URL as a volume with the file url. */ -}}
{{- define "join.database" -}}
secretName: {{ .secretName }}
defaultMode: 0440
{{- if ne .key "url" }}
items: [{key: {{ .key }}, path: url}]
{{- end }}
{{- end -}}
