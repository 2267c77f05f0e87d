// Package deploy tests what is under deploy/ with the programs that will read it: kustomize, Helm, and the parser of
// Prometheus. No cluster is needed; that a cluster takes the objects is tested in integration/kube.
package deploy

import (
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	root     = "../.."
	chartDir = root + "/deploy/helm/union-csi"
)

type object = map[string]any

// dig walks down mappings; nil where a step is missing.
func dig(from any, path ...string) any {
	for _, key := range path {
		mapping, ok := from.(map[string]any)
		if !ok {
			return nil
		}
		from = mapping[key]
	}
	return from
}

// key names an object as the API server does.
func key(o object) string {
	namespace, _ := dig(o, "metadata", "namespace").(string)
	return fmt.Sprintf("%v %v %s/%v", o["apiVersion"], o["kind"], namespace, dig(o, "metadata", "name"))
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// documents splits a YAML stream; empty ones are left out.
func documents(t *testing.T, text string) []object {
	t.Helper()
	var all []object
	for _, part := range strings.Split("\n"+text, "\n---") {
		var o object
		if err := yaml.UnmarshalStrict([]byte(part), &o); err != nil {
			t.Fatalf("%v in\n%s", err, part)
		}
		if len(o) > 0 {
			all = append(all, o)
		}
	}
	return all
}

// byKey refuses two objects of one name.
func byKey(t *testing.T, objects []object) map[string]object {
	t.Helper()
	named := map[string]object{}
	for _, o := range objects {
		if _, twice := named[key(o)]; twice {
			t.Errorf("%s is there twice", key(o))
		}
		named[key(o)] = o
	}
	return named
}

// kustomized is what kubectl apply -k would apply.
func kustomized(t *testing.T, directory string) map[string]object {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(root, directory))
	if err != nil {
		t.Fatal(err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return byKey(t, documents(t, string(text)))
}

// rendered is what helm install would make in a release of this namespace; values as YAML.
func rendered(t *testing.T, releaseNamespace, values string) (map[string]object, error) {
	t.Helper()
	// Helm tells of each symbolic link of the chart: they are meant, its files are kustomize's.
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	var given map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	options := chartutil.ReleaseOptions{Name: "union-csi", Namespace: releaseNamespace, Revision: 1, IsInstall: true}
	capabilities := chartutil.DefaultCapabilities.Copy()
	all, err := chartutil.ToRenderValues(chart, given, options, capabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	var objects []object
	for name, text := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			if strings.Contains(text, "<no value>") {
				t.Errorf("the notes lack something:\n%s", text)
			}
			continue
		}
		objects = append(objects, documents(t, text)...)
	}
	return byKey(t, objects), nil
}

func mustRender(t *testing.T, releaseNamespace, values string) map[string]object {
	t.Helper()
	objects, err := rendered(t, releaseNamespace, values)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}
