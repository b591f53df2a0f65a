{{/* How clients find the servers: one address for all of them. */}}
{{- define "kvik.address" -}}
{{- if .Values.store.etcd -}}
etcd:{{ .Values.store.etcd }}
{{- else if or .Values.store.log.enabled .Values.store.object.url -}}
file:/etc/kvik/store/servers
{{- else -}}
dns:{{ include "kvik.store" . }}:7500
{{- end -}}
{{- end -}}
