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
