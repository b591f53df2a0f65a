{{/* Names, labels, and what pods of both kinds have in common. */}}

{{- define "kvik.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "kvik" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvik" (.Release.Name | trunc 35 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "kvik.store" -}}
{{- include "kvik.fullname" . }}-store
{{- end -}}

{{- define "kvik.router" -}}
{{- include "kvik.fullname" . }}-router
{{- end -}}

{{/* Labels that select the pods of a component: (list $ "store"). They never change. */}}
{{- define "kvik.selector" -}}
app.kubernetes.io/part-of: kvik
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end -}}

{{- define "kvik.labels" -}}
{{ include "kvik.selector" . }}
app.kubernetes.io/name: kvik
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvik.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The pod's address as the host of HOST:PORT. */}}
{{- define "kvik.podHost" -}}
{{ if .Values.ipv6 }}[$(POD_IP)]{{ else }}$(POD_IP){{ end }}
{{- end -}}

{{- define "kvik.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvik.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What admits to the store: variables of a container. */}}
{{- define "kvik.admission" -}}
{{- if .Values.secret.name }}
- name: KVIK_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: KVIK_SECRET
{{- end }}
{{- if .Values.tls.secretName }}
- name: KVIK_TLS
  value: /etc/kvik/tls
{{- end }}
{{- end -}}

{{/* Where a pod may run: the values of its component. */}}
{{- define "kvik.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
