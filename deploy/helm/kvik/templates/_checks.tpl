{{/* What the schema cannot say: values that do not go together. */}}
{{- define "kvik.checks" -}}
{{- $store := .Values.store -}}
{{- if not (or $store.enabled .Values.router.enabled) -}}
{{- fail "store.enabled and router.enabled are both false: there is nothing to install" -}}
{{- end -}}
{{- if $store.enabled -}}
{{- if gt (int $store.copies) (int $store.replicas) -}}
{{- fail (printf "store.copies is %d, and store.replicas %d: each copy takes a server of its own" (int $store.copies) (int $store.replicas)) -}}
{{- end -}}
{{- if not (or .Values.secret.name .Values.tls.secretName) -}}
{{- fail "secret.name and tls.secretName are both empty: beyond loopback a store demands a secret or TLS" -}}
{{- end -}}
{{- if $store.log.enabled -}}
{{- $volume := include "kvik.volume" . | int64 -}}
{{- $size := include "kvik.mebibytes" $store.log.size | int64 -}}
{{- if lt $volume $size -}}
{{- fail (printf "store.log.volumeSize is %s, less than store.log.size, %s: a log may take all of its size" $store.log.volumeSize $store.log.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.router.enabled (not (and .Values.router.prefill .Values.router.decode)) -}}
{{- fail "router.prefill and router.decode name the engines, http://HOST:PORT each, and one of them is empty: the router finds no engines by itself" -}}
{{- end -}}
{{- end -}}
