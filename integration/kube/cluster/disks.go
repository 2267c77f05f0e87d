package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// defaultPools are three disks of each node. They are sparse files: their space is taken as it is written.
const defaultPools = "a=2G:ext4,b=3G:xfs,c=1G:ext4"

// pool is a disk of a node, mounted below /srv/pools.
type pool struct {
	Name       string
	Bytes      int64
	Filesystem string
}

var poolSpec = regexp.MustCompile(`^([a-z0-9-]+)=([0-9]+)([MG]):(ext4|xfs|btrfs)$`)

// parsePools reads "a=2G:ext4,b=300M:xfs"; an empty text is no pool.
func parsePools(text string) ([]pool, error) {
	var pools []pool
	for spec := range strings.SplitSeq(text, ",") {
		if spec == "" {
			continue
		}
		match := poolSpec.FindStringSubmatch(spec)
		if match == nil {
			return nil, fmt.Errorf("a pool is NAME=SIZE:FILESYSTEM, such as a=2G:ext4 or b=300M:xfs, not %q", spec)
		}
		number, err := strconv.ParseInt(match[2], 10, 32)
		if err != nil {
			return nil, err
		}
		unit := int64(1 << 20)
		if match[3] == "G" {
			unit = 1 << 30
		}
		pools = append(pools, pool{match[1], number * unit, match[4]})
	}
	return pools, nil
}

// addPool makes a disk if it is not there yet, and mounts it. The files of the disks are reached by an open directory,
// since a node's own mounts hide the path to it.
func (s *supervisor) addPool(disks *os.File, p pool) error {
	reached := fmt.Sprintf("/proc/self/fd/%d/%s.img", disks.Fd(), p.Name)
	if _, err := os.Stat(reached); os.IsNotExist(err) {
		if err := s.makeDisk(disks, p); err != nil {
			return err
		}
	}
	image, err := os.OpenFile(reached, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer image.Close()
	loop, err := attachLoop(image)
	if err != nil {
		return err
	}
	// The mount keeps the device; the last unmount frees it.
	defer loop.Close()
	target := filepath.Join("/srv/pools", p.Name)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return mount(loop.Name(), target, p.Filesystem, 0, "")
}

// makeDisk makes the file of a disk with its filesystem, under another name until it is complete.
func (s *supervisor) makeDisk(disks *os.File, p pool) error {
	path := fmt.Sprintf("/proc/%d/fd/%d/%s", os.Getpid(), disks.Fd(), p.Name)
	if err := os.WriteFile(path+".new", nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(path+".new", p.Bytes); err != nil {
		return err
	}
	force := "-f"
	if p.Filesystem == "ext4" {
		force = "-F"
	}
	if err := s.run("mkfs."+p.Filesystem, "-q", force, path+".new"); err != nil {
		return err
	}
	return os.Rename(path+".new", path+".img")
}

// attachLoop attaches a free loop device that frees itself with its last user. Others on the machine look for one too.
func attachLoop(image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	const attempts = 100
	for attempt := 0; ; attempt++ {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		config := &unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), config); err == nil {
			return loop, nil
		}
		_ = loop.Close()
		if err != unix.EBUSY || attempt == attempts {
			return nil, fmt.Errorf("attach %s: %w", loop.Name(), err)
		}
	}
}
