package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const controlUsage = `usage: integration/kube/ctl [--dir DIR] COMMAND

  status                         all programs of the cluster and its nodes
  stop|kill|start|restart SERVICE
  pause|resume SERVICE           with SIGSTOP and SIGCONT: it runs and does not answer
  pool nK NAME=SIZE:FILESYSTEM   one more disk below /srv/pools of a running node
  exec -- COMMAND                run a command where the cluster's network and processes are
  node nK [-- COMMAND]           run a command (default: a shell) in a node
  log SERVICE                    what a program wrote
  list                           directories of this checkout's clusters that run
  end                            end a kept cluster

SERVICE is etcd, apiserver, controller-manager, scheduler, nK/kubelet, nK/containerd, or nK for a whole node (kill is
loss of power, stop and start the same as there is nothing to shut down in it; its disks stay).
DIR is UNION_KUBE_DIR by default, or else the only one of this checkout's clusters.`

func control(arguments []string) error {
	dir := os.Getenv("UNION_KUBE_DIR")
	if len(arguments) > 1 && arguments[0] == "--dir" {
		dir, arguments = arguments[1], arguments[2:]
	}
	if len(arguments) == 0 {
		return errors.New(controlUsage)
	}
	verb, arguments := arguments[0], arguments[1:]
	running := clusters()
	if verb == "list" {
		for _, cluster := range running {
			fmt.Println(cluster)
		}
		return nil
	}
	if dir == "" {
		if len(running) != 1 {
			return fmt.Errorf("which cluster? Set UNION_KUBE_DIR or give --dir; running: %s", strings.Join(running, " "))
		}
		dir = running[0]
	}
	o, err := readOptions(dir)
	if err != nil {
		return err
	}
	argument := func(n int) string {
		if n < len(arguments) {
			return arguments[n]
		}
		return ""
	}
	switch verb {
	case "status":
		return printStatus(o)
	case "stop", "kill", "start", "restart", "pause", "resume":
		if argument(0) == "" {
			return errors.New(controlUsage)
		}
		socket, service := o.socket(argument(0))
		_, err := ask(socket, request{Verb: verb, Service: service})
		return err
	case "pool":
		if !slices.Contains(o.nodes(), argument(0)) {
			return fmt.Errorf("there is no node %q", argument(0))
		}
		_, err := ask(filepath.Join(o.Dir, argument(0), "control.sock"), request{Verb: verb, Value: argument(1)})
		return err
	case "exec", "node":
		node := ""
		if verb == "node" {
			if node = argument(0); !slices.Contains(o.nodes(), node) {
				return fmt.Errorf("there is no node %q", node)
			}
			arguments = arguments[1:]
		}
		if argument(0) == "--" {
			arguments = arguments[1:]
		}
		if len(arguments) == 0 {
			arguments = []string{"bash"}
		}
		return enter(o, node, arguments)
	case "log":
		text, err := os.ReadFile(filepath.Join(o.Dir, "log", strings.ReplaceAll(argument(0), "/", "-")+".log"))
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(text)
		return err
	case "end":
		return endCluster(o)
	default:
		return errors.New(controlUsage)
	}
}

// clusters are the directories of those that run and that this program started: another checkout's are not ours to end.
func clusters() []string {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	envs, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPattern+"*", "env"))
	var dirs []string
	for _, env := range envs {
		if o, err := readOptions(filepath.Dir(env)); err == nil && o.Programs == filepath.Dir(self) {
			dirs = append(dirs, o.Dir)
		}
	}
	return dirs
}

// socket that a service is controlled by, and its name there.
func (o *options) socket(service string) (string, string) {
	node, program, in := strings.Cut(service, "/")
	if in {
		return filepath.Join(o.Dir, node, "control.sock"), program
	}
	return filepath.Join(o.Dir, "control.sock"), strings.TrimPrefix(service, "kube-")
}

func printStatus(o *options) error {
	print := func(prefix, socket string) error {
		answer, err := ask(socket, request{Verb: "status"})
		for _, v := range answer.Services {
			fmt.Printf("%-22s %-30s %d\n", prefix+v.Name, v.State, v.Pid)
		}
		return err
	}
	if err := print("", filepath.Join(o.Dir, "control.sock")); err != nil {
		return err
	}
	for _, node := range o.nodes() {
		// A node that is down does not answer.
		_ = print(node+"/", filepath.Join(o.Dir, node, "control.sock"))
	}
	return nil
}

// enter runs a command in the cluster's namespaces, or in a node's, in place of this process.
func enter(o *options, node string, command []string) error {
	inside := os.Getenv("UNION_KUBE_INSIDE") == o.Dir
	environ := o.environ()
	if node != "" {
		if !inside {
			return enter(o, "", append([]string{o.self(), "ctl", "--dir", o.Dir, "node", node, "--"}, command...))
		}
		pid, err := os.ReadFile(filepath.Join(o.Dir, node, "pid"))
		if err != nil {
			return err
		}
		// What runs in a node counts as the node's.
		if err := joinControlGroups(filepath.Base(o.Dir), node); err != nil {
			return err
		}
		return replace(append([]string{"nsenter", "--target", string(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--"}, command...), environ)
	}
	if inside {
		return replace(command, environ)
	}
	pid, err := os.ReadFile(filepath.Join(o.Dir, "init.pid"))
	if err != nil {
		return err
	}
	cwd, err := os.Getwd()
	if err != nil {
		return err
	}
	namespaces := []string{"nsenter", "--target", string(pid), "--mount", "--uts", "--ipc", "--pid"}
	if o.Nodes > 0 {
		namespaces = append(namespaces, "--net")
	}
	// Entering a mount namespace leads to its root.
	return replace(append(append(namespaces, "--", "sh", "-c", `cd "$0" && exec "$@"`, cwd), command...), environ)
}

func replace(command, environ []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, command, environ)
}

// endCluster ends a cluster and waits until nothing is left of it.
func endCluster(o *options) error {
	text, err := os.ReadFile(filepath.Join(o.Dir, "run.pid"))
	if err != nil {
		return err
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		return err
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !strings.Contains(string(line), "cluster\x00run\x00") {
		sweepAbandoned()
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	for begun := time.Now(); time.Since(begun) < endTime+sweepTime; time.Sleep(readyStep) {
		if _, err := os.Stat(o.Dir); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	return fmt.Errorf("the cluster in %s does not end", o.Dir)
}
