{{- define "polarkv.name" -}}
{{ .Values.name }}
{{- end }}

{{- define "polarkv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "polarkv.labels" -}}
app.kubernetes.io/name: {{ include "polarkv.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "polarkv.selector" -}}
app.kubernetes.io/name: {{ include "polarkv.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* Without a namespace, and so unlike any other release's. */ -}}
{{- define "polarkv.webhookConfiguration" -}}
{{ .Release.Namespace }}-{{ include "polarkv.name" . }}-webhook
{{- end }}

{{- define "polarkv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "polarkv.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
