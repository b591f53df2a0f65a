{{/* Sizes: kvik's "4GiB" and Kubernetes' "4Gi". The schema has them as whole numbers of MiB, GiB or TiB. */}}

{{/* As a number of MiB. */}}
{{- define "kvik.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "TiB" . -}}
{{- mul $number 1048576 -}}
{{- else if hasSuffix "GiB" . -}}
{{- mul $number 1024 -}}
{{- else -}}
{{- $number -}}
{{- end -}}
{{- end -}}

{{/* A number of MiB as Kubernetes writes it. */}}
{{- define "kvik.quantity" -}}
{{- if mod . 1024 -}}
{{- printf "%dMi" . -}}
{{- else -}}
{{- printf "%dGi" (div . 1024) -}}
{{- end -}}
{{- end -}}

{{/* What a pod of the store may take. */}}
{{- define "kvik.storeMemory" -}}
{{- $memory := include "kvik.mebibytes" .Values.store.memory | int64 -}}
{{- $beside := include "kvik.mebibytes" .Values.store.memoryBeside | int64 -}}
{{- include "kvik.quantity" (add $memory $beside) -}}
{{- end -}}

{{/* The volume of a log, in MiB. */}}
{{- define "kvik.volume" -}}
{{- $size := include "kvik.mebibytes" .Values.store.log.size | int64 -}}
{{- if .Values.store.log.volumeSize -}}
{{- include "kvik.mebibytes" .Values.store.log.volumeSize -}}
{{- else -}}
{{- div (add (mul $size 11) 9) 10 -}}
{{- end -}}
{{- end -}}
