package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How long the kernel may take to end processes and to let loop devices go, on a busy machine.
const (
	sweepTime = 60 * time.Second
	sweepStep = 20 * time.Millisecond
)

// sweep waits until the process that leads the cluster is gone, and removes what the kernel leaves: the cluster's control
// groups and its directory.
func sweep(dir string) error {
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return remove(dir)
}

func remove(dir string) error {
	if text, err := os.ReadFile(filepath.Join(dir, "init.pid")); err == nil {
		pid, err := strconv.Atoi(string(text))
		if err != nil {
			return err
		}
		if err := awaitEnd(dir, pid); err != nil {
			return err
		}
	}
	if err := within("loop devices are still in use", func() bool { return !loopsBelow(dir) }); err != nil {
		return err
	}
	if err := removeControlGroups(filepath.Base(dir)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// awaitEnd ends the first process of a cluster's namespaces, which the kernel does as well, and waits for it. The number
// could be another process's by now: ours has the directory in its command line.
func awaitEnd(dir string, pid int) error {
	ours := func() bool {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return err == nil && strings.HasSuffix(string(line), "\x00init\x00"+dir+"\x00")
	}
	if ours() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return within(fmt.Sprintf("process %d does not end", pid), func() bool { return !ours() })
}

// loopsBelow tells whether a loop device has its file below a directory. The last unmount frees it, which happens a little
// after the end of the namespace that it was mounted in.
func loopsBelow(dir string) bool {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		if backing, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(backing), dir+"/") {
			return true
		}
	}
	return false
}

func within(what string, done func() bool) error {
	for begun := time.Now(); !done(); time.Sleep(sweepStep) {
		if time.Since(begun) > sweepTime {
			return fmt.Errorf("%s after %s", what, sweepTime)
		}
	}
	return nil
}

// sweepAbandoned removes what clusters left whose sweeper was killed too: nobody holds the lock of their directories.
func sweepAbandoned() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPattern+"*"))
	for _, dir := range dirs {
		lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			if err := remove(dir); err != nil {
				fmt.Fprintf(os.Stderr, "union-kube: left by an earlier run: %s: %v\n", dir, err)
			}
		}
		_ = lock.Close()
	}
}
