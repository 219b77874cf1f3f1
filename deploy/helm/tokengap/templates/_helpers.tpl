{{- define "tokengap.name" -}}
{{- if contains "tokengap" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-tokengap{{ end }}
{{- end }}

{{- define "tokengap.labels" -}}
app.kubernetes.io/name: tokengap
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "tokengap.metadata" -}}
name: {{ include "tokengap.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "tokengap.labels" . | nindent 2 }}
{{- end }}

{{- /* Labels by which pods are found. */ -}}
{{- define "tokengap.selector" -}}
{{- if eq .Values.form "sidecar" -}}
{{ toYaml .Values.sidecarPodLabels }}
{{- else -}}
app.kubernetes.io/name: tokengap
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{- /* The container, in either form. */ -}}
{{- define "tokengap.container" -}}
name: tokengap
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve, --config, /etc/tokengap/tokengap.yaml, --listen, ":10788"]
ports:
  - name: metrics
    containerPort: 10788
livenessProbe:
  httpGet: {path: /-/healthy, port: metrics}
readinessProbe:
  httpGet: {path: /-/ready, port: metrics}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: tokengap, mountPath: /etc/tokengap, readOnly: true}
{{- end }}

{{- define "tokengap.unprivileged" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* The volume with its settings. */ -}}
{{- define "tokengap.volume" -}}
name: tokengap
{{- if .Values.settingsSecret }}
secret: {secretName: {{ .Values.settingsSecret }}}
{{- else }}
configMap: {name: {{ include "tokengap.name" . }}}
{{- end }}
{{- end }}

{{- /* For the pod of a proxy, in a chart that has this one among its dependencies:
         containers:
           - {{- include "tokengap.sidecar" .Subcharts.tokengap | nindent 14 }}
         volumes:
           - {{- include "tokengap.volume" .Subcharts.tokengap | nindent 14 }} */ -}}
{{- define "tokengap.sidecar" -}}
{{ include "tokengap.container" . }}
securityContext:
  {{- include "tokengap.unprivileged" . | nindent 2 }}
{{- end }}
