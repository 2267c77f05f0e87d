package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// initCluster is the first process of a cluster's namespaces. The kernel ends everything else in them with it.
func initCluster(dir string) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	o, err := readOptions(dir)
	if err != nil {
		return err
	}
	if err := privateMounts(); err != nil {
		return err
	}
	if err := dropForeignMounts(); err != nil {
		return err
	}
	if o.Nodes > 0 {
		if err := unix.Sethostname([]byte("control-plane")); err != nil {
			return err
		}
	}
	s := newSupervisor()
	outcome := make(chan error, 1)
	go func() { outcome <- o.live(s) }()
	select {
	case err = <-outcome:
	case caught := <-signals:
		err = s.endCommand(o, caught, outcome)
	}
	if o.Logs != "" {
		err = errors.Join(err, s.copyLogs(o))
	}
	return err
}

// endCommand ends the user's command, if it runs, and waits for it.
func (s *supervisor) endCommand(o *options, caught os.Signal, outcome chan error) error {
	command := int(s.command.Load())
	if command == 0 {
		return nil
	}
	// The terminal has told the command itself of an interrupt.
	if caught != syscall.SIGINT {
		_ = syscall.Kill(command, syscall.SIGTERM)
	}
	select {
	case err := <-outcome:
		return err
	case <-time.After(stopTime):
		return fmt.Errorf("the command did not end within %s of being told to", stopTime)
	}
}

// privateMounts takes this mount namespace out of what others see, with a /proc of its own PID namespace.
func privateMounts() error {
	if err := mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return err
	}
	return replaceMount("proc", "/proc")
}

// dropForeignMounts lets go of what others have mounted from files and by FUSE: a copy of a mount keeps its loop device and
// its filesystem in use, and others wait for theirs to be free.
func dropForeignMounts() error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 2 || left[4] == "/" {
			continue
		}
		if strings.HasPrefix(right[1], "/dev/loop") || strings.HasPrefix(right[0], "fuse") && right[0] != "fusectl" {
			// It may have gone with one that it was below.
			_ = unix.Unmount(left[4], unix.MNT_DETACH)
		}
	}
	return nil
}

// live starts the cluster, and runs the command in it or waits for ever.
func (o *options) live(s *supervisor) error {
	begun := time.Now()
	if err := o.startControlPlane(s); err != nil {
		return err
	}
	if o.Nodes > 0 {
		if err := o.startNodes(s); err != nil {
			return err
		}
	}
	if err := s.serve(filepath.Join(o.Dir, "control.sock"), func(asked request) error {
		return fmt.Errorf("unknown: %s", asked.Verb)
	}); err != nil {
		return err
	}
	if err := o.writeEnvironment(); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "union-kube: ready after %.1f s\n", time.Since(begun).Seconds())
	if o.Keep {
		select {}
	}
	pid, exited, err := s.spawn(o.Command, &os.ProcAttr{
		Dir:   o.Cwd,
		Env:   o.environ(),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return err
	}
	s.command.Store(int64(pid))
	switch status := <-exited; {
	case status.Signaled():
		return exitStatus(128 + int(status.Signal()))
	case status.ExitStatus() != 0:
		return exitStatus(status.ExitStatus())
	}
	return nil
}

func (o *options) startControlPlane(s *supervisor) error {
	if o.Nodes > 0 {
		if err := o.controlPlaneNetwork(s); err != nil {
			return err
		}
	}
	services, keys, err := controlPlane(o, o.components())
	if err != nil {
		return err
	}
	o.keys = keys
	s.services = services
	for _, v := range services {
		if err := s.start(v); err != nil {
			return err
		}
	}
	return nil
}

// writeEnvironment writes the file that a shell reads to use the cluster. That it exists means that the cluster is ready.
func (o *options) writeEnvironment() error {
	var lines []string
	for name, value := range o.environment() {
		lines = append(lines, fmt.Sprintf("export %s='%s'\n", name, value))
	}
	sort.Strings(lines)
	lines = append(lines, fmt.Sprintf("export PATH='%s':\"$PATH\"\n", filepath.Join(o.Dir, "bin")))
	path := filepath.Join(o.Dir, "env")
	if err := os.WriteFile(path+".new", []byte(strings.Join(lines, "")), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// copyLogs copies every log of the cluster to where the user wants them.
func (s *supervisor) copyLogs(o *options) error {
	logs, err := filepath.Glob(filepath.Join(o.Dir, "log", "*"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.Logs, 0o755); err != nil {
		return err
	}
	return s.run(append([]string{"cp", "--recursive", "--target-directory=" + o.Logs}, logs...)...)
}
