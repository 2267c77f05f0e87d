package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"sort"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// Annotations that only Helm's objects carry: Helm's own (keep the namespace and the definitions when the release goes), and
// the configuration's checksum, which kustomize cannot compute.
var onlyHelms = regexp.MustCompile(`^(helm\.sh/.*|union\.io/config)$`)

// comparable drops what may differ, and parses the agent's configuration, whose comments are kustomize's alone.
func comparable(t *testing.T, o object) object {
	t.Helper()
	var copied object
	raw, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &copied); err != nil {
		t.Fatal(err)
	}
	dropAnnotations(copied)
	if template, ok := dig(copied, "spec", "template").(map[string]any); ok {
		dropAnnotations(template)
	}
	if data, ok := copied["data"].(map[string]any); ok {
		if text, ok := data["agent.yaml"].(string); ok {
			data["agent.yaml"] = documents(t, text)[0]
		}
	}
	return copied
}

func dropAnnotations(o map[string]any) {
	metadata, _ := o["metadata"].(map[string]any)
	annotations, _ := metadata["annotations"].(map[string]any)
	for name := range annotations {
		if onlyHelms.MatchString(name) {
			delete(annotations, name)
		}
	}
	if len(annotations) == 0 {
		delete(metadata, "annotations")
	}
}

func compare(t *testing.T, kustomize, helm map[string]object) {
	t.Helper()
	for name, o := range kustomize {
		other, there := helm[name]
		if !there {
			t.Errorf("the chart lacks %s", name)
			continue
		}
		want, got := comparable(t, o), comparable(t, other)
		if !reflect.DeepEqual(want, got) {
			a, _ := yaml.Marshal(want)
			b, _ := yaml.Marshal(got)
			t.Errorf("%s differs; kustomize:\n%s\nhelm:\n%s", name, a, b)
		}
	}
	for name := range helm {
		if _, there := kustomize[name]; !there {
			t.Errorf("only the chart has %s", name)
		}
	}
}

func TestTheChartRendersToTheObjectsOfKustomize(t *testing.T) {
	compare(t, kustomized(t, "deploy"), mustRender(t, "default", ""))
}

func TestTheMonitoringOfTheChartIsThatOfKustomize(t *testing.T) {
	kustomize := kustomized(t, "deploy/monitoring")
	values := `{http: {listen: "0.0.0.0:9830"}, monitoring: {podMonitor: true, rules: true, dashboard: true}}`
	helm := mustRender(t, "default", values)
	// The address is the one thing that both say in their own way.
	for _, objects := range []map[string]object{kustomize, helm} {
		delete(objects, "apps/v1 DaemonSet union/union-csi")
		delete(objects, "v1 ConfigMap union/union-csi")
	}
	compare(t, kustomize, helm)
}

func TestVersionsAreThatOfTheProgram(t *testing.T) {
	version := regexp.MustCompile(`(?m)^version = "(.*)"$`).FindStringSubmatch(read(t, "Cargo.toml"))[1]
	chart := documents(t, read(t, "deploy/helm/union-csi/Chart.yaml"))[0]
	if chart["version"] != version || chart["appVersion"] != version {
		t.Errorf("Chart.yaml has %v and %v, Cargo.toml %s", chart["version"], chart["appVersion"], version)
	}
	daemons := kustomized(t, "deploy")["apps/v1 DaemonSet union/union-csi"]
	image := container(t, daemons)["image"].(string)
	if !strings.HasSuffix(image, ":"+version) {
		t.Errorf("deploy/base/daemonset.yaml has image %s, Cargo.toml version %s", image, version)
	}
	recipe := read(t, "deploy/image/Containerfile")
	if !strings.Contains(recipe, "-t "+image+" ") || !strings.Contains(recipe, fmt.Sprintf("image.version=%q", version)) {
		t.Errorf("deploy/image/Containerfile does not make %s", image)
	}
}

func container(t *testing.T, daemons object) map[string]any {
	t.Helper()
	all, _ := dig(daemons, "spec", "template", "spec", "containers").([]any)
	if len(all) != 1 {
		t.Fatalf("the DaemonSet has %d containers, not one", len(all))
	}
	return all[0].(map[string]any)
}

func TestTheAgentIsOneContainerWithoutDirectoriesOfTheHost(t *testing.T) {
	daemons := kustomized(t, "deploy")["apps/v1 DaemonSet union/union-csi"]
	container(t, daemons)
	spec := dig(daemons, "spec", "template", "spec").(map[string]any)
	if spec["initContainers"] != nil {
		t.Error("the DaemonSet has init containers")
	}
	for _, volume := range spec["volumes"].([]any) {
		if dig(volume, "configMap") == nil {
			t.Errorf("volume %v is not a ConfigMap", volume)
		}
	}
}

type setting struct {
	path, description string
	fallback          any
}

// settings are the leaves of the schema: what a user can set.
func settings(t *testing.T, schema map[string]any, defaults any, at string) []setting {
	t.Helper()
	var all []setting
	properties := schema["properties"].(map[string]any)
	for name, below := range properties {
		path, below := at+name, below.(map[string]any)
		if name == "global" {
			continue
		}
		value, there := defaults.(map[string]any)[name]
		if !there {
			t.Errorf("values.yaml does not set %s", path)
		}
		if _, nested := below["properties"]; nested && path != "resources" {
			if below["additionalProperties"] != false {
				t.Errorf("%s lets misspelt keys through", path)
			}
			all = append(all, settings(t, below, value, path+".")...)
			continue
		}
		description, _ := below["description"].(string)
		if !strings.HasSuffix(description, ".") {
			t.Errorf("%s has no description", path)
		}
		all = append(all, setting{path, description, value})
	}
	for name := range defaults.(map[string]any) {
		if _, there := properties[name]; !there {
			t.Errorf("the schema does not have %s%s", at, name)
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].path < all[j].path })
	return all
}

func TestValuesAreFewAndDescribed(t *testing.T) {
	var schema, defaults map[string]any
	if err := json.Unmarshal([]byte(read(t, "deploy/helm/union-csi/values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict([]byte(read(t, "deploy/helm/union-csi/values.yaml")), &defaults); err != nil {
		t.Fatal(err)
	}
	all := settings(t, schema, defaults, "")
	if len(all) > 30 {
		t.Errorf("%d values are more than 30", len(all))
	}
	table := "| value | default | meaning |\n|---|---|---|\n"
	for _, s := range all {
		fallback, err := json.Marshal(s.fallback)
		if err != nil {
			t.Fatal(err)
		}
		table += fmt.Sprintf("| `%s` | `%s` | %s |\n", s.path, fallback, s.description)
	}
	part(t, "docs/KUBERNETES.md", "values", table)
}

// part compares the generated part of a document with what the chart says now, or writes it when UNION_CSI_WRITE_DOCS is set.
func part(t *testing.T, path, name, generated string) {
	t.Helper()
	text := read(t, path)
	begin, end := fmt.Sprintf("<!-- %s: begin -->\n", name), fmt.Sprintf("<!-- %s: end -->", name)
	before, rest, found := strings.Cut(text, begin)
	inside, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s lacks the marks of %s", path, name)
	}
	wanted := "\n" + generated + "\n"
	if os.Getenv("UNION_CSI_WRITE_DOCS") != "" {
		if err := os.WriteFile(filepath.Join(root, path), []byte(before+begin+wanted+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if inside != wanted {
		t.Errorf("%s is not up to date: run UNION_CSI_WRITE_DOCS=1 go test ./... in integration/deploy", path)
	}
}

func TestWrongValuesAreRefused(t *testing.T) {
	for values, word := range map[string]string{
		`{replicas: 3}`:                                               "replicas",
		`{image: {tga: "1"}}`:                                         "tga",
		`{image: {tag: latest}}`:                                      "tag",
		`{http: {listen: "off"}}`:                                     "listen",
		`{http: {listen: localhost}}`:                                 "listen",
		`{kubeletDir: var/lib/kubelet}`:                               "kubeletDir",
		`{poolsUnder: [{path: srv}]}`:                                 "path",
		`{pools: [{name: a}]}`:                                        "path",
		`{pools: [{name: a, path: /a, reserve: much}]}`:               "reserve",
		`{maxUnavailable: 0}`:                                         "maxUnavailable",
		`{config: {pools: []}}`:                                       "pools",
		`{storageClasses: [{name: a, reclaimPolicy: x}]}`:             "reclaimPolicy",
		`{storageClasses: [{parameters: {}}]}`:                        "name",
		`{storageClasses: [{name: a, parameters: {minBranches: 2}}]}`: "minBranches",
		`{monitoring: {podMonitor: true}}`:                            "http.listen",
		`{log: {format: xml}}`:                                        "format",
	} {
		_, err := rendered(t, "default", values)
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s should be refused for %s: %v", values, word, err)
		}
	}
}

func TestValuesReachTheObjects(t *testing.T) {
	objects := mustRender(t, "default", `
namespace: storage
image: {repository: registry.example/union-csi, tag: "9.9.9", pullSecrets: [{name: registry}]}
poolsUnder: [{path: /mnt/union, labels: {tier: fast}}]
pools: [{name: a, path: /a, reserve: 20Gi}]
http: {listen: "[::]:9900"}
kubeletDir: /var/snap/microk8s/common/var/lib/kubelet
log: {filter: debug, format: json}
config: {maxVolumes: 50, kubernetes: {leaseDuration: 30s}}
storageClasses:
  - {name: one, default: true, parameters: {strategy: balanced}, reclaimPolicy: Retain, volumeBindingMode: Immediate}
  - {name: two}
env: [{name: RUST_BACKTRACE, value: "1"}]
nodeSelector: {disk: big}
tolerations: []
priorityClassName: high
maxUnavailable: 1
resources: {limits: null, requests: {cpu: 1m}}
podAnnotations: {a: b}
podLabels: {c: d}
`)
	for name, o := range objects {
		if namespace := dig(o, "metadata", "namespace"); namespace != nil && namespace != "storage" {
			t.Errorf("%s is not in the namespace", name)
		}
		subjects, _ := o["subjects"].([]any)
		for _, subject := range subjects {
			if dig(subject, "namespace") != "storage" {
				t.Errorf("%s binds %v", name, subject)
			}
		}
	}
	namespace := objects["v1 Namespace /storage"]
	if dig(namespace, "metadata", "labels", "pod-security.kubernetes.io/enforce") != "privileged" {
		t.Errorf("the namespace does not let the agent run: %v", namespace)
	}
	configuration := documents(t, objects["v1 ConfigMap storage/union-csi"]["data"].(map[string]any)["agent.yaml"].(string))[0]
	want := documents(t, `
poolsUnder: [{path: /mnt/union, labels: {tier: fast}}]
pools: [{name: a, path: /a, reserve: 20Gi}]
http: {listen: "[::]:9900"}
kubernetes: {namespace: storage, kubeletDir: /var/snap/microk8s/common/var/lib/kubelet, leaseDuration: 30s}
log: {filter: debug, format: json}
maxVolumes: 50
`)[0]
	if !reflect.DeepEqual(configuration, want) {
		t.Errorf("agent.yaml is %v", configuration)
	}
	one, two := objects["storage.k8s.io/v1 StorageClass /one"], objects["storage.k8s.io/v1 StorageClass /two"]
	if dig(one, "metadata", "annotations", "storageclass.kubernetes.io/is-default-class") != "true" ||
		one["reclaimPolicy"] != "Retain" || one["volumeBindingMode"] != "Immediate" {
		t.Errorf("class one is %v", one)
	}
	if dig(two, "metadata", "annotations") != nil || two["volumeBindingMode"] != "WaitForFirstConsumer" {
		t.Errorf("class two is %v", two)
	}
	daemons := objects["apps/v1 DaemonSet storage/union-csi"]
	agent := container(t, daemons)
	probe := dig(agent, "livenessProbe", "httpGet")
	if dig(probe, "host") != "::1" || fmt.Sprint(dig(probe, "port")) != "9900" {
		t.Errorf("the probe asks %v", probe)
	}
	spec := dig(daemons, "spec", "template", "spec").(map[string]any)
	if agent["image"] != "registry.example/union-csi:9.9.9" || spec["tolerations"] != nil ||
		spec["priorityClassName"] != "high" || dig(spec, "nodeSelector", "disk") != "big" ||
		dig(daemons, "spec", "template", "metadata", "labels", "c") != "d" ||
		dig(daemons, "spec", "template", "metadata", "annotations", "a") != "b" || len(agent["env"].([]any)) != 3 ||
		dig(agent, "resources", "limits") != nil || len(spec["imagePullSecrets"].([]any)) != 1 {
		t.Errorf("the DaemonSet is %v", daemons)
	}
}

func TestAReleaseInTheNamespaceItselfDoesNotMakeIt(t *testing.T) {
	objects := mustRender(t, "union", "")
	if _, there := objects["v1 Namespace /union"]; there {
		t.Error("helm install --create-namespace would fail over its own namespace")
	}
}

func TestAnotherConfigurationReplacesTheAgents(t *testing.T) {
	annotation := func(values string) any {
		daemons := mustRender(t, "default", values)["apps/v1 DaemonSet union/union-csi"]
		return dig(daemons, "spec", "template", "metadata", "annotations", "union.io/config")
	}
	if annotation("") == annotation(`{log: {filter: debug}}`) || annotation("") != annotation(`{podLabels: {a: b}}`) {
		t.Error("the annotation does not tell configurations apart")
	}
}

func TestUninstallingKeepsWhatVolumesDependOn(t *testing.T) {
	for name, o := range mustRender(t, "default", "") {
		kept := dig(o, "metadata", "annotations", "helm.sh/resource-policy") == "keep"
		kind := o["kind"]
		if wanted := kind == "Namespace" || kind == "CustomResourceDefinition"; kept != wanted {
			t.Errorf("%s: kept %v", name, kept)
		}
	}
}
