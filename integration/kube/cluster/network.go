package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The nodes and the control plane are on one bridge; each node has a range for its pods, to which the others have a route.
// Without kube-proxy, the API server has the first service's address itself, which is all that pods need of services.
const (
	bridge         = "br0"
	nodeRange      = "10.10.0.%d"
	nodePrefix     = "/24"
	gatewayAddress = "10.10.0.1"
	nameServer     = "10.96.0.10"
	// Addresses of nodes begin here.
	firstNode = 10
	maxNodes  = 50
)

func nodeAddress(n int) string { return fmt.Sprintf(nodeRange, firstNode+n) }
func podRange(n int) string    { return fmt.Sprintf("10.244.%d.0/24", n) }

// number of a node: 1 for n1.
func (o *options) number(node string) int { return slices.Index(o.nodes(), node) + 1 }

// controlPlaneNetwork makes the bridge, with the addresses of the API server and routes to the pods.
func (o *options) controlPlaneNetwork(s *supervisor) error {
	steps := [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "link", "add", bridge, "type", "bridge"},
		{"ip", "address", "add", gatewayAddress + nodePrefix, "dev", bridge},
		{"ip", "address", "add", serviceAddress + "/32", "dev", bridge},
		{"ip", "link", "set", bridge, "up"},
	}
	for n := range o.Nodes {
		steps = append(steps, []string{"ip", "route", "add", podRange(n + 1), "via", nodeAddress(n + 1)})
	}
	for _, step := range steps {
		if err := s.run(step...); err != nil {
			return err
		}
	}
	// Packets to addresses that nobody has are answered, so that nobody waits.
	if err := forwardPackets(); err != nil {
		return err
	}
	hosts := filepath.Join(o.Dir, "hosts")
	if err := os.WriteFile(hosts, []byte(o.hosts()), 0o644); err != nil {
		return err
	}
	return bind(hosts, "/etc/hosts")
}

// hosts is the file by which everybody finds everybody.
func (o *options) hosts() string {
	lines := []string{"127.0.0.1 localhost", "::1 localhost", gatewayAddress + " control-plane"}
	for n, name := range o.Names {
		lines = append(lines, nodeAddress(n+1)+" "+name)
	}
	return strings.Join(lines, "\n") + "\n"
}

// plug connects the first process of a node to the bridge. What is left of the node's earlier life may not be gone yet.
func (o *options) plug(s *supervisor, node string, pid int) error {
	_ = s.run("ip", "link", "delete", node)
	if err := s.run("ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(pid)); err != nil {
		return err
	}
	return s.run("ip", "link", "set", node, "master", bridge, "up")
}

// nodeNetwork sets up the node's end, from within.
func (o *options) nodeNetwork(s *supervisor, node string) error {
	number := o.number(node)
	steps := [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "address", "add", nodeAddress(number) + nodePrefix, "dev", "eth0"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "route", "add", "default", "via", gatewayAddress},
	}
	for n := range o.Nodes {
		if n+1 != number {
			steps = append(steps, []string{"ip", "route", "add", podRange(n + 1), "via", nodeAddress(n + 1)})
		}
	}
	for _, step := range steps {
		if err := s.run(step...); err != nil {
			return err
		}
	}
	return forwardPackets()
}

func forwardPackets() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }
