package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

const (
	// The container that holds a pod's namespaces needs a program that does nothing.
	pauseImage   = "localhost/pause:1"
	pauseArchive = "pause.tar"
	imageUsage   = `usage: integration/kube/image ROOTFS_DIR NAME[:TAG] [ENTRYPOINT [ARGUMENT]...]

Makes a container image of a directory and puts it into all nodes of the cluster of UNION_KUBE_DIR. Pods that use it must have
imagePullPolicy Never.`
)

func image(arguments []string) error {
	if len(arguments) < 2 {
		return errors.New(imageUsage)
	}
	dir := os.Getenv("UNION_KUBE_DIR")
	if running := clusters(); dir == "" && len(running) == 1 {
		dir = running[0]
	}
	if dir == "" {
		return errors.New("which cluster? Set UNION_KUBE_DIR")
	}
	o, err := readOptions(dir)
	if err != nil {
		return err
	}
	archive, err := os.CreateTemp(o.Dir, "image.*.tar")
	if err != nil {
		return err
	}
	defer os.Remove(archive.Name())
	defer archive.Close()
	run := func(argv ...string) error {
		output, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, output)
		}
		return nil
	}
	if err := writeImage(run, archive, arguments[0], arguments[1], arguments[2:]); err != nil {
		return err
	}
	imported := make(chan error, o.Nodes)
	for _, node := range o.nodes() {
		go func() {
			imported <- run(append([]string{o.self(), "ctl", "--dir", o.Dir, "node", node, "--"},
				importCommand(o.snapshotter(), archive.Name())...)...)
		}()
	}
	for range o.Nodes {
		err = errors.Join(err, <-imported)
	}
	return err
}

// importCommand puts an archive into a node's containerd where the kubelet looks for images.
func importCommand(snapshotter, archive string) []string {
	return []string{"ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", "--snapshotter", snapshotter, archive}
}

// writePauseImage makes the image of the pods' first containers.
func (o *options) writePauseImage(s *supervisor) error {
	rootfs := filepath.Join(o.Dir, "pause")
	if err := os.MkdirAll(rootfs, 0o755); err != nil {
		return err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	if err := s.run("cp", busybox, filepath.Join(rootfs, "sleep")); err != nil {
		return err
	}
	archive, err := os.Create(filepath.Join(o.Dir, pauseArchive))
	if err != nil {
		return err
	}
	defer archive.Close()
	return writeImage(s.run, archive, rootfs, pauseImage, []string{"/sleep", "infinity"})
}

// writeImage writes a directory as an image of one layer, in the form that `docker save` writes.
func writeImage(run func(...string) error, archive *os.File, rootfs, name string, entrypoint []string) error {
	if !strings.Contains(filepath.Base(name), ":") {
		name += ":latest"
	}
	layer := archive.Name() + ".layer"
	defer os.Remove(layer)
	if err := run("tar", "--create", "--numeric-owner", "--file="+layer, "--directory="+rootfs, "."); err != nil {
		return err
	}
	content, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer content.Close()
	hash := sha256.New()
	size, err := io.Copy(hash, content)
	if err != nil {
		return err
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config": map[string]any{
			"Entrypoint": entrypoint,
			"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(hash.Sum(nil))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	out := tar.NewWriter(archive)
	for _, file := range []struct {
		name    string
		size    int64
		content io.Reader
	}{
		{"manifest.json", int64(len(manifest)), strings.NewReader(string(manifest))},
		{"config.json", int64(len(config)), strings.NewReader(string(config))},
		{"layer.tar", size, content},
	} {
		if err := out.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: file.size}); err != nil {
			return err
		}
		if _, err := io.Copy(out, file.content); err != nil {
			return err
		}
	}
	return out.Close()
}
