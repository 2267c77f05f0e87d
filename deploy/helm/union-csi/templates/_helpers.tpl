{{/* A file that kustomize uses too, in the chosen namespace. */}}
{{- define "union-csi.file" -}}
{{- $text := .root.Files.Get (printf "files/%s" .file) -}}
{{- $text = regexReplaceAll "(?m)^(\\s*)namespace: union$" $text (printf "${1}namespace: %s" .root.Values.namespace) -}}
{{- $text -}}
{{- end -}}

{{/* agent.yaml: what the values say, and over it what .Values.config says. */}}
{{- define "union-csi.config" -}}
{{- $said := dict
      "poolsUnder" .Values.poolsUnder
      "http" (dict "listen" .Values.http.listen)
      "kubernetes" (dict "namespace" .Values.namespace "kubeletDir" .Values.kubeletDir)
      "log" (dict "filter" .Values.log.filter) -}}
{{- if .Values.pools }}{{- $_ := set $said "pools" .Values.pools }}{{- end -}}
{{- if .Values.network }}{{- $_ := set $said "network" .Values.network }}{{- end -}}
{{- if ne .Values.log.format "text" }}{{- $_ := set $said.log "format" .Values.log.format }}{{- end -}}
{{- toYaml (mergeOverwrite $said (deepCopy .Values.config)) -}}
{{- end -}}

{{/* The port of http.listen, and the address that the kubelet of the node reaches it at. */}}
{{- define "union-csi.port" -}}
{{- regexFind "[0-9]+$" .Values.http.listen -}}
{{- end -}}
{{- define "union-csi.probeHost" -}}
{{- $host := trimSuffix (printf ":%s" (include "union-csi.port" .)) .Values.http.listen -}}
{{- if has $host (list "0.0.0.0" "127.0.0.1") -}}127.0.0.1
{{- else if has $host (list "[::]" "[::1]") -}}::1
{{- else -}}{{- $host | trimPrefix "[" | trimSuffix "]" -}}{{- end -}}
{{- end -}}

{{/* Labels of the monitoring objects, added to those of a file. */}}
{{- define "union-csi.monitored" -}}
{{- $object := include "union-csi.file" . | fromYaml -}}
{{- $_ := set $object.metadata "labels" (merge (dict) .root.Values.monitoring.labels ($object.metadata.labels | default dict)) -}}
{{- toYaml $object -}}
{{- end -}}
