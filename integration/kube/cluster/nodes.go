package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// startNodes starts all nodes at once, and waits until Kubernetes says that they are ready and pods can be made.
func (o *options) startNodes(s *supervisor) error {
	if err := o.writePauseImage(s); err != nil {
		return err
	}
	client, err := o.keys.clientTLS()
	if err != nil {
		return err
	}
	started := make(chan error, o.Nodes)
	for _, node := range o.nodes() {
		v, err := o.nodeService(s, node)
		if err != nil {
			return err
		}
		s.services = append(s.services, v)
		go func() {
			err := s.start(v)
			if err != nil {
				err = fmt.Errorf("%w\n%s\n%s", err, tail(filepath.Join(o.Dir, "log", node+"-containerd.log")),
					tail(filepath.Join(o.Dir, "log", node+"-kubelet.log")))
			}
			started <- err
		}()
	}
	for range o.Nodes {
		if err := <-started; err != nil {
			return err
		}
	}
	var why error
	for begun := time.Now(); time.Since(begun) < readyTime; time.Sleep(readyStep) {
		if why = o.usable(client); why == nil {
			return nil
		}
	}
	for _, node := range o.nodes() {
		why = fmt.Errorf("%w\n%s", why, tail(filepath.Join(o.Dir, "log", node+"-kubelet.log")))
	}
	return fmt.Errorf("the nodes are not ready after %s: %w", readyTime, why)
}

// usable tells why no pod could be made now.
func (o *options) usable(config *tls.Config) error {
	var nodes struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status, Message string }
			}
		}
	}
	if err := get(config, "/api/v1/nodes", &nodes); err != nil {
		return err
	}
	ready := 0
	missing := slices.Clone(o.Names)
	var why error
	for _, node := range nodes.Items {
		missing = slices.DeleteFunc(missing, func(name string) bool { return name == node.Metadata.Name })
		for _, condition := range node.Status.Conditions {
			switch {
			case condition.Type != "Ready":
			case condition.Status == "True":
				ready++
			default:
				why = fmt.Errorf("%s: %s", node.Metadata.Name, condition.Message)
			}
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("not registered: %s", strings.Join(missing, " "))
	}
	if ready < o.Nodes {
		return why
	}
	// Admission refuses pods whose account does not exist yet.
	return get(config, "/api/v1/namespaces/default/serviceaccounts/default", &struct{}{})
}

// get asks the API server.
func get(config *tls.Config, path string, into any) error {
	client := &http.Client{Timeout: askTime, Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	response, err := client.Get("https://" + serviceAddress + ":443" + path)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, response.Status)
	}
	return json.NewDecoder(response.Body).Decode(into)
}
