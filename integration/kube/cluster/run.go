package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Directories of clusters. Short, because a socket's path has 107 bytes at most.
	dirPattern = "union-kube."
	// How long a whole cluster may take to be ready, or to end.
	clusterTime = 5 * time.Minute
	endTime     = 90 * time.Second
	// A kept cluster ends by itself after this time unless told otherwise.
	keepDefault = 2 * time.Hour
)

const runUsage = `usage: integration/kube/run [OPTION]... [-- COMMAND [ARGUMENT]...]

  --api-only              only etcd and the API server, on free ports of the machine's loopback
  --controller-manager    with --api-only: the controller manager too
  --nodes N               a control plane and N nodes in namespaces of their own (default 1)
  --names A,B,...         what Kubernetes calls the nodes, 63 characters at most (default n1,n2,...)
  --pools SPEC            disks below /srv/pools of each node (default a=2G:ext4,b=3G:xfs,c=1G:ext4)
  --node-pools nK=SPEC    the same for one node; nK= for a node without any
  --audit                 write log/audit.log: each request to the API, with who made it
  --logs DIR              copy all logs there at the end
  --apiserver-arg ARG, --controller-manager-arg ARG, --kubelet-arg ARG
  --keep                  leave the cluster running in the background; end it with: integration/kube/ctl end
  --for DURATION          how long a kept cluster lives at most (default 2h)

The command gets KUBECONFIG, UNION_KUBE_DIR, UNION_KUBE_NODES, and kubectl in its PATH.`

func parseRun(arguments []string) (o *options, life time.Duration, err error) {
	o = &options{Nodes: 1, Pools: map[string][]pool{}}
	life = keepDefault
	common, err := parsePools(defaultPools)
	if err != nil {
		return nil, 0, err
	}
	single := map[string][]pool{}
	for len(arguments) > 0 {
		name, value, given := strings.Cut(arguments[0], "=")
		arguments = arguments[1:]
		argument := func() string {
			if !given && len(arguments) > 0 {
				value, given, arguments = arguments[0], true, arguments[1:]
			}
			if !given {
				err = fmt.Errorf("%s needs a value\n%s", name, runUsage)
			}
			return value
		}
		switch name {
		case "--":
			o.Command, arguments = arguments, nil
		case "--api-only":
			o.Nodes = 0
		case "--controller-manager":
			o.ControllerManager = true
		case "--audit":
			o.Audit = true
		case "--keep":
			o.Keep = true
		case "--nodes":
			if o.Nodes, err = strconv.Atoi(argument()); err == nil && (o.Nodes < 1 || o.Nodes > maxNodes) {
				err = fmt.Errorf("--nodes takes 1 to %d", maxNodes)
			}
		case "--names":
			o.Names = strings.Split(argument(), ",")
		case "--pools":
			common, err = parsePools(argument())
		case "--node-pools":
			node, spec, ok := strings.Cut(argument(), "=")
			if !ok {
				err = errors.New("--node-pools takes NODE=SPEC")
				break
			}
			single[node], err = parsePools(spec)
		case "--logs":
			o.Logs, err = filepath.Abs(argument())
		case "--for":
			life, err = time.ParseDuration(argument())
		case "--apiserver-arg":
			o.APIServerArgs = append(o.APIServerArgs, argument())
		case "--controller-manager-arg":
			o.ControllerManagerArgs = append(o.ControllerManagerArgs, argument())
		case "--kubelet-arg":
			o.KubeletArgs = append(o.KubeletArgs, argument())
		default:
			err = errors.New(runUsage)
		}
		if err != nil {
			return nil, 0, err
		}
	}
	if o.Names == nil {
		o.Names = o.nodes()
	}
	if len(o.Names) != o.Nodes {
		return nil, 0, fmt.Errorf("%d names for %d nodes", len(o.Names), o.Nodes)
	}
	for _, name := range o.Names {
		// A kubelet labels its node with the name, and a label has no more room.
		if name == "" || len(name) > maxHostname {
			return nil, 0, fmt.Errorf("a node's name has 1 to %d characters", maxHostname)
		}
	}
	if len(o.Command) == 0 && !o.Keep {
		return nil, 0, errors.New(runUsage)
	}
	for _, node := range o.nodes() {
		o.Pools[node] = common
		if pools, given := single[node]; given {
			o.Pools[node] = pools
			delete(single, node)
		}
	}
	for node := range single {
		return nil, 0, fmt.Errorf("--node-pools: there is no node %q", node)
	}
	return o, life, nil
}

func run(arguments []string) error {
	if len(arguments) == 3 && arguments[0] == "--hold" {
		return hold(arguments[1], arguments[2])
	}
	o, life, err := parseRun(arguments)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o.Programs = filepath.Dir(self)
	o.Root = filepath.Dir(filepath.Dir(o.Programs))
	if o.Cwd, err = os.Getwd(); err != nil {
		return err
	}
	sweepAbandoned()
	if o.Dir, err = os.MkdirTemp("", dirPattern); err != nil {
		return err
	}
	for _, dir := range []string{"bin", "log"} {
		if err := os.Mkdir(filepath.Join(o.Dir, dir), 0o700); err != nil {
			return err
		}
	}
	for _, name := range []string{"kubectl", "helm"} {
		target := o.components()
		if name == "helm" {
			target = filepath.Join(o.Programs, "helm")
		}
		if err := os.Symlink(target, filepath.Join(o.Dir, "bin", name)); err != nil {
			return err
		}
	}
	if err := o.write(); err != nil {
		return err
	}
	if !o.Keep {
		return lead(o, 0)
	}
	return keep(o, life)
}

// keep starts a cluster in the background, waits until it is ready, and then runs the command, if any, in it.
func keep(o *options, life time.Duration) error {
	logPath := filepath.Join(o.Dir, "log", "run.log")
	log, err := os.Create(logPath)
	if err != nil {
		return err
	}
	defer log.Close()
	holder := exec.Command(o.self(), "run", "--hold", o.Dir, life.String())
	holder.Stdout, holder.Stderr = log, log
	holder.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := holder.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- holder.Wait() }()
	for begun := time.Now(); ; time.Sleep(readyStep) {
		select {
		case err := <-ended:
			text, _ := io.ReadAll(mustOpen(log))
			return fmt.Errorf("the cluster did not start: %w\n%s", err, text)
		default:
		}
		if _, err := os.Stat(filepath.Join(o.Dir, "env")); err == nil {
			break
		}
		if time.Since(begun) > clusterTime {
			_ = holder.Process.Signal(syscall.SIGTERM)
			return fmt.Errorf("the cluster is not ready after %s\n%s", clusterTime, tail(logPath))
		}
	}
	fmt.Fprintf(os.Stderr, `the cluster is ready, and ends by itself in %s:
  . %s/env
  integration/kube/ctl exec -- kubectl get nodes
  integration/kube/ctl end
`, life, o.Dir)
	if len(o.Command) == 0 {
		return nil
	}
	return enter(o, "", o.Command)
}

// mustOpen opens a file again from its beginning, by its descriptor: its name may be gone.
func mustOpen(file *os.File) io.Reader {
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
	if err != nil {
		return strings.NewReader(err.Error())
	}
	return again
}

// hold is the background half of keep.
func hold(dir, duration string) error {
	o, err := readOptions(dir)
	if err != nil {
		return err
	}
	life, err := time.ParseDuration(duration)
	if err != nil {
		return err
	}
	return lead(o, life)
}

// lead makes the cluster's namespaces, and ends everything when the first process in them ends, or when it is told to.
func lead(o *options, life time.Duration) error {
	// The kernel ends a process with the thread that started it, when asked to end it with its parent.
	runtime.LockOSThread()
	// Locked before it has its name: a directory whose lock is free is taken for abandoned.
	path := filepath.Join(o.Dir, "lock")
	lock, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	sweeper, end, err := startSweeper(o, lock)
	if err != nil {
		return err
	}
	status, err := leadInit(o, life)
	end()
	if swept := sweeper.Wait(); err == nil && swept != nil {
		err = fmt.Errorf("cleaning up: %w", swept)
	}
	if err == nil && status != 0 {
		err = status
	}
	return err
}

// startSweeper starts the process that cleans up when this one is gone: it sees its end of a pipe closed.
func startSweeper(o *options, lock *os.File) (*exec.Cmd, func(), error) {
	wait, end, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer wait.Close()
	sweeper := exec.Command(o.self(), "sweep", o.Dir)
	sweeper.Stdin, sweeper.Stderr = wait, os.Stderr
	sweeper.ExtraFiles = []*os.File{lock}
	sweeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := sweeper.Start(); err != nil {
		return nil, nil, err
	}
	return sweeper, func() { _ = end.Close() }, nil
}

func leadInit(o *options, life time.Duration) (exitStatus, error) {
	first := exec.Command(o.self(), "init", o.Dir)
	first.Stdin, first.Stdout, first.Stderr = os.Stdin, os.Stdout, os.Stderr
	first.Dir = o.Cwd
	first.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	if o.Nodes > 0 {
		first.SysProcAttr.Cloneflags |= unix.CLONE_NEWNET
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if err := first.Start(); err != nil {
		return 0, err
	}
	for name, pid := range map[string]int{"init.pid": first.Process.Pid, "run.pid": os.Getpid()} {
		if err := os.WriteFile(filepath.Join(o.Dir, name), []byte(strconv.Itoa(pid)), 0o600); err != nil {
			_ = first.Process.Kill()
			return 0, err
		}
	}
	if life > 0 {
		time.AfterFunc(life, func() { signals <- syscall.SIGTERM })
	}
	ended := make(chan error, 1)
	go func() { ended <- first.Wait() }()
	var kill <-chan time.Time
	for {
		select {
		case caught := <-signals:
			_ = first.Process.Signal(caught)
			if kill == nil {
				kill = time.After(endTime)
			}
		case <-kill:
			_ = first.Process.Kill()
		case err := <-ended:
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				if code := exit.ExitCode(); code > 0 {
					return exitStatus(code), nil
				}
			}
			return 0, err
		}
	}
}
