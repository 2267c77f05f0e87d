// Cluster runs a Kubernetes cluster for the length of one command, on one machine, in namespaces of its own: a control
// plane and any number of nodes, each with its own mounts, processes, network, disks, containerd and kubelet.
//
//	cluster run [OPTION]... -- COMMAND   a cluster for one command
//	cluster run --keep [OPTION]...       a cluster until `cluster ctl end`
//	cluster ctl ...                      stop, start and look into what runs
//	cluster image ROOTFS NAME            put a container image into all nodes
//
// The processes form a tree, in which nothing outlives what is above it:
//
//	cluster run        holds the lock on the cluster's directory; ends the cluster when it ends, however it ends
//	├─ cluster sweep   waits for the end of the above, then removes what the kernel does not: control groups, the directory
//	└─ cluster init    first process of the cluster's namespaces: etcd, API server, ..., COMMAND
//	   └─ cluster node first process of a node's namespaces: containerd, kubelet, containers
package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("usage: cluster run|ctl|image ..."))
	}
	arguments := os.Args[2:]
	var err error
	switch os.Args[1] {
	case "run":
		err = run(arguments)
	case "ctl":
		err = control(arguments)
	case "image":
		err = image(arguments)
	case "init":
		err = initCluster(arguments[0])
	case "join":
		err = joinNode(arguments[0], arguments[1])
	case "node":
		err = initNode(arguments[0], arguments[1])
	case "sweep":
		err = sweep(arguments[0])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	fail(err)
}

// exitStatus is how a command that was run for the user ended; it is passed on without a message.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("status %d", int(e)) }

func fail(err error) {
	var status exitStatus
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &status):
		os.Exit(int(status))
	default:
		fmt.Fprintln(os.Stderr, "union-kube:", err)
		os.Exit(1)
	}
}

// options of one cluster. They are written to its directory, where all its parts read them.
type options struct {
	// Dir is the cluster's directory.
	Dir string
	// Programs is the directory of union-kube and of this program.
	Programs string
	// Root is the project's directory: it is visible in the nodes too.
	Root string
	// Nodes is how many there are; without any, there is an API server on the machine's loopback and nothing else.
	Nodes             int
	ControllerManager bool
	// Names that Kubernetes knows the nodes by. Here they are n1, n2, ...
	Names []string
	// Pools of each node, by its name here.
	Pools map[string][]pool
	Audit bool
	Keep  bool
	// Logs, if given, is where the logs are copied at the end.
	Logs                  string
	APIServerArgs         []string
	ControllerManagerArgs []string
	KubeletArgs           []string
	Command               []string
	Cwd                   string

	keys *authority
}

func readOptions(dir string) (*options, error) {
	text, err := os.ReadFile(filepath.Join(dir, "options.json"))
	if err != nil {
		return nil, err
	}
	o := &options{}
	return o, json.Unmarshal(text, o)
}

func (o *options) write() error {
	text, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.Dir, "options.json"), text, 0o600)
}

// nodes are the names of the nodes here: n1, n2, ...
func (o *options) nodes() []string {
	var all []string
	for n := range o.Nodes {
		all = append(all, fmt.Sprintf("n%d", n+1))
	}
	return all
}

// path of a program of Kubernetes and of this one.
func (o *options) components() string { return filepath.Join(o.Programs, "union-kube") }
func (o *options) self() string       { return filepath.Join(o.Programs, "cluster") }

// environment is what commands get that use the cluster.
func (o *options) environment() map[string]string {
	return map[string]string{
		"KUBECONFIG":       filepath.Join(o.Dir, "admin.kubeconfig"),
		"UNION_KUBE_DIR":   o.Dir,
		"UNION_KUBE_NODES": strings.Join(o.Names, " "),
	}
}

// environ is this process's environment with the cluster's.
func (o *options) environ() []string {
	ours := o.environment()
	environ := slices.DeleteFunc(os.Environ(), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		_, replaced := ours[name]
		return replaced || name == "PATH" || name == "UNION_KUBE_INSIDE"
	})
	for name, value := range ours {
		environ = append(environ, name+"="+value)
	}
	// For commands that are already where they would enter.
	environ = append(environ, "UNION_KUBE_INSIDE="+o.Dir)
	environ = append(environ, "PATH="+filepath.Join(o.Dir, "bin")+":"+os.Getenv("PATH"))
	if o.Nodes > 0 {
		// There is no way out of the cluster's network.
		environ = append(environ, "CARGO_NET_OFFLINE=true", "GOPROXY=off")
	}
	return environ
}

func encode(data []byte) string { return base64.StdEncoding.EncodeToString(data) }
