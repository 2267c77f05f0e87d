package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

func mount(source, target, filesystem string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, filesystem, flags, data); err != nil {
		return fmt.Errorf("mount %s %s on %s: %w", filesystem, source, target, err)
	}
	return nil
}

func bind(source, target string) error {
	return mount(source, target, "", unix.MS_BIND|unix.MS_REC, "")
}

// replaceMount mounts a filesystem of the kernel in place of the one that is there, and of what is mounted below that: the
// list of mounts shall be that of a machine.
func replaceMount(filesystem, target string) error {
	_ = unix.Unmount(target, unix.MNT_DETACH)
	return mount(filesystem, target, filesystem, 0, "")
}
