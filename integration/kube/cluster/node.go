package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	containerdSocket = "/run/containerd/containerd.sock"
	kubeletHealth    = "http://127.0.0.1:10248/healthz"
	nodeNamespaces   = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET
	// What fits into a host's name and a label's value. An object of kind Node may have a longer name, with no kubelet.
	maxHostname = 63
)

// nodeService is a node as the cluster's first process sees it: one program with namespaces of its own.
func (o *options) nodeService(s *supervisor, node string) (*service, error) {
	dir := filepath.Join(o.Dir, node)
	name, address := o.Names[o.number(node)-1], nodeAddress(o.number(node))
	for _, sub := range []string{"disks", "tmp", "srv/pools", "opt", "var"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky); err != nil {
		return nil, err
	}
	if err := o.keys.issue("kubelet-"+node, identity{name: "kubelet " + node, addresses: []string{name, address, "127.0.0.1"}}); err != nil {
		return nil, err
	}
	who := identity{name: "system:node:" + name, groups: []string{"system:nodes"}}
	server := "https://" + serviceAddress + ":443"
	if err := o.keys.kubeconfig(filepath.Join(dir, node+".kubeconfig"), server, who); err != nil {
		return nil, err
	}
	return &service{
		name:       node,
		argv:       []string{o.self(), "join", o.Dir, node},
		namespaces: nodeNamespaces,
		log:        filepath.Join(o.Dir, "log", node+".log"),
		started: func(pid int) error {
			if err := os.Remove(filepath.Join(dir, "control.sock")); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, "pid"), []byte(strconv.Itoa(pid)), 0o600); err != nil {
				return err
			}
			return o.plug(s, node, pid)
		},
		ready: func() error {
			_, err := ask(filepath.Join(dir, "control.sock"), request{Verb: "status"})
			return err
		},
	}, nil
}

// joinNode is a node's first process until it has its control groups: then it becomes initNode.
func joinNode(dir, node string) error {
	// The byte says that the network is there.
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	if err := joinControlGroups(filepath.Base(dir), node); err != nil {
		return err
	}
	// The namespace is the thread's that unshares, and what the thread executes takes it over.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(self, []string{self, "node", dir, node}, os.Environ())
}

// initNode is the first process of a node's namespaces: what a machine's kernel and init do before a kubelet starts.
func initNode(dir, node string) error {
	o, err := readOptions(dir)
	if err != nil {
		return err
	}
	number := o.number(node)
	name := o.Names[number-1]
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	if err := os.Unsetenv("TMPDIR"); err != nil {
		return err
	}
	disks, err := os.Open(filepath.Join(dir, node, "disks"))
	if err != nil {
		return err
	}
	s := newSupervisor()
	if err := o.nodeMounts(s, node); err != nil {
		return err
	}
	if err := o.nodeNetwork(s, node); err != nil {
		return err
	}
	for _, p := range o.Pools[node] {
		if err := s.addPool(disks, p); err != nil {
			return err
		}
	}
	if err := o.nodeFiles(node); err != nil {
		return err
	}
	log := func(program string) string { return filepath.Join(dir, "log", node+"-"+program+".log") }
	containerd := &service{
		name: "containerd",
		argv: []string{"containerd", "--config", "/etc/containerd/config.toml"},
		log:  log("containerd"),
		ready: func() error {
			connection, err := net.DialTimeout("unix", containerdSocket, askTime)
			if err != nil {
				return err
			}
			return connection.Close()
		},
	}
	kubelet := &service{
		name: "kubelet",
		argv: append([]string{o.components(), "kubelet",
			"--config=/etc/kubernetes/kubelet.yaml",
			"--kubeconfig=" + filepath.Join(dir, node, node+".kubeconfig"),
			"--hostname-override=" + name,
			"--node-ip=" + nodeAddress(number)}, o.KubeletArgs...),
		log:   log("kubelet"),
		ready: answers(kubeletHealth, nil),
	}
	s.services = []*service{containerd, kubelet}
	if err := s.start(containerd); err != nil {
		return err
	}
	if err := s.run(importCommand(o.snapshotter(), filepath.Join(dir, pauseArchive))...); err != nil {
		return err
	}
	if err := s.start(kubelet); err != nil {
		return err
	}
	err = s.serve(filepath.Join(dir, node, "control.sock"), func(asked request) error {
		if asked.Verb != "pool" {
			return fmt.Errorf("unknown: %s", asked.Verb)
		}
		pools, err := parsePools(asked.Value)
		if err != nil {
			return err
		}
		for _, p := range pools {
			if err := s.addPool(disks, p); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	select {}
}

// nodeMounts gives the node its own /etc, /var, /run, /tmp, /srv, /opt, /sys and control groups. Everything else is the
// machine's, and so are the devices.
func (o *options) nodeMounts(s *supervisor, node string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	if err := privateMounts(); err != nil {
		return err
	}
	dir := filepath.Join(o.Dir, node)
	etc := filepath.Join(dir, "etc")
	if _, err := os.Stat(etc); errors.Is(err, fs.ErrNotExist) {
		if err := s.run("cp", "--archive", "/etc", etc); err != nil {
			return err
		}
	}
	// The cluster's and the project's directories stay where they are, also when they are below one that is hidden.
	kept := []string{o.Dir, o.Root, o.Programs}
	trees := make([]int, len(kept))
	for i, path := range kept {
		trees[i], err = unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("open_tree %s: %w", path, err)
		}
	}
	for _, name := range []string{"etc", "var", "srv", "opt", "tmp"} {
		if err := bind(filepath.Join(dir, name), "/"+name); err != nil {
			return err
		}
	}
	for _, temporary := range []string{"/run", "/dev/shm"} {
		if err := mount("tmpfs", temporary, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return err
		}
	}
	for i, path := range kept {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(trees[i], "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("move_mount %s: %w", path, err)
		}
		_ = unix.Close(trees[i])
	}
	if err := replaceMount("sysfs", "/sys"); err != nil {
		return err
	}
	if err := mountControlGroups(all); err != nil {
		return err
	}
	// As a host with systemd has it.
	if err := mount("fusectl", "/sys/fs/fuse/connections", "fusectl", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		return err
	}
	if err := o.ownKernel(node); err != nil {
		return err
	}
	return mount("", "/", "", unix.MS_SHARED|unix.MS_REC, "")
}

// ownKernel hides settings of the machine's kernel behind files: the kubelet would change them for the whole machine, and a
// node that is started again must look as if its kernel had been too.
func (o *options) ownKernel(node string) error {
	boot := make([]byte, 16)
	if _, err := rand.Read(boot); err != nil {
		return err
	}
	id := hex.EncodeToString(boot)
	for setting, value := range map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
		"kernel/random/boot_id":     strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-"),
	} {
		file := filepath.Join("/run", "kernel."+strings.ReplaceAll(setting, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o444); err != nil {
			return err
		}
		if err := bind(file, "/proc/sys/"+setting); err != nil {
			return err
		}
	}
	return nil
}

// nodeFiles writes the settings of the node's programs. The settings of the kubelet and containerd that are not the
// defaults are those that a machine with control groups of version 1, or without CAP_SYS_RESOURCE, needs.
func (o *options) nodeFiles(node string) error {
	number := o.number(node)
	machine := make([]byte, 16)
	if _, err := rand.Read(machine); err != nil {
		return err
	}
	keys := func(name string) string { return filepath.Join(o.Dir, "pki", name) }
	for path, text := range map[string]string{
		"/etc/hosts":       o.hosts(),
		"/etc/hostname":    o.Names[number-1] + "\n",
		"/etc/resolv.conf": "# no name servers\n",
		"/etc/machine-id":  hex.EncodeToString(machine) + "\n",
		"/etc/cni/net.d/10-pods.conflist": fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
    "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}
  }]
}
`, podRange(number)),
		"/etc/containerd/config.toml": fmt.Sprintf(`version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
address = %q
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %q
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = %q
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
`, containerdSocket, pauseImage, o.snapshotter()),
		"/etc/kubernetes/kubelet.yaml": fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %q}}
authorization: {mode: Webhook}
tlsCertFile: %q
tlsPrivateKeyFile: %q
containerRuntimeEndpoint: "unix://%s"
cgroupDriver: cgroupfs
failCgroupV1: false
cgroupsPerQOS: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
oomScoreAdj: 0
failSwapOn: false
maxPods: 200
clusterDomain: cluster.local
# Nobody is there: names do not resolve, and pods have no warning about it.
clusterDNS: ["%s"]
resolvConf: /etc/resolv.conf
# The disk is the machine's: how full it is is not the test's affair.
evictionHard: {"memory.available": "0%%", "nodefs.available": "0%%", "nodefs.inodesFree": "0%%", "imagefs.available": "0%%"}
imageGCHighThresholdPercent: 100
registryPullQPS: 0
`, keys("ca.crt"), keys("kubelet-"+node+".crt"), keys("kubelet-"+node+".key"), containerdSocket, nameServer),
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		// What was a link to the machine's file becomes the node's own file.
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, sub := range []string{"lib/kubelet", "lib/containerd", "lib/union-csi", "lib/cni", "log/pods", "log/containers", "tmp", "cache"} {
		if err := os.MkdirAll(filepath.Join("/var", sub), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/run", "/var/run"); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// snapshotter that works where the cluster's directory is: the usual one cannot be on a union filesystem itself.
func (o *options) snapshotter() string {
	var statfs unix.Statfs_t
	if err := unix.Statfs(o.Dir, &statfs); err == nil && statfs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "native"
	}
	return "overlayfs"
}
