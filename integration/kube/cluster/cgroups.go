package main

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// firstGroup holds a node's own processes where groups of version 2 have only groups in them or only processes.
const firstGroup = "init"

// hierarchy is one mounted hierarchy of control groups: the only one of version 2, or one of version 1 for each controller.
type hierarchy struct {
	path, filesystem, options string
}

// hierarchies that are mounted now, by /proc/self/mountinfo.
func hierarchies() ([]hierarchy, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	seen := map[string]bool{}
	var all []hierarchy
	for lines := bufio.NewScanner(file); lines.Scan(); {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 || !strings.HasPrefix(right[0], "cgroup") || seen[left[4]] {
			continue
		}
		seen[left[4]] = true
		h := hierarchy{path: left[4], filesystem: right[0]}
		if h.filesystem == "cgroup" {
			var options []string
			for option := range strings.SplitSeq(right[2], ",") {
				if option != "rw" && option != "ro" {
					options = append(options, option)
				}
			}
			h.options = strings.Join(options, ",")
		}
		all = append(all, h)
	}
	return all, nil
}

// joinControlGroups moves this process into control groups of its own, below one for the cluster, in every hierarchy.
func joinControlGroups(cluster, node string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		group := h.path
		for _, name := range []string{cluster, node} {
			if h.filesystem == "cgroup2" {
				delegate(group)
			}
			parent := group
			group = filepath.Join(group, name)
			if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			// A group of version 1 without processors or memory takes no process.
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				if text, err := os.ReadFile(filepath.Join(parent, file)); err == nil && h.filesystem == "cgroup" {
					if err := os.WriteFile(filepath.Join(group, file), text, 0); err != nil {
						return err
					}
				}
			}
		}
		err := joinGroup(group)
		if errors.Is(err, unix.EBUSY) {
			err = joinGroup(filepath.Join(group, firstGroup))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func joinGroup(group string) error {
	return os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte("0"), 0)
}

// delegate gives the children of a group of version 2 all the controllers that it has itself.
func delegate(group string) {
	available, _ := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	for controller := range strings.FieldsSeq(string(available)) {
		_ = os.WriteFile(filepath.Join(group, "cgroup.subtree_control"), []byte("+"+controller), 0)
	}
}

// mountControlGroups mounts the hierarchies as this process's control group namespace shows them, at all as its root.
func mountControlGroups(all []hierarchy) error {
	const root = "/sys/fs/cgroup"
	if len(all) == 1 && all[0].path == root {
		if err := mount("cgroup2", root, "cgroup2", 0, ""); err != nil {
			return err
		}
		// A group of version 2 that has processes gives its children no controllers.
		first := filepath.Join(root, firstGroup)
		if err := os.Mkdir(first, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := joinGroup(first); err != nil {
			return err
		}
		delegate(root)
		return nil
	}
	if err := mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	for _, h := range all {
		if err := os.MkdirAll(h.path, 0o755); err != nil {
			return err
		}
		if err := mount("cgroup", h.path, h.filesystem, 0, h.options); err != nil {
			return err
		}
	}
	return nil
}

// removeControlGroups removes a cluster's control groups, whose processes are gone.
func removeControlGroups(cluster string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		top := filepath.Join(h.path, cluster)
		if err := within("control groups are still in use: "+top, func() bool { return removeTree(top) }); err != nil {
			return err
		}
	}
	return nil
}

// removeTree removes a tree of control groups from its leaves, and tells whether it is gone. Its files go with the groups.
func removeTree(top string) bool {
	children, err := os.ReadDir(top)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, child := range children {
		if child.IsDir() {
			removeTree(filepath.Join(top, child.Name()))
		}
	}
	err = unix.Rmdir(top)
	return err == nil || errors.Is(err, unix.ENOENT)
}
