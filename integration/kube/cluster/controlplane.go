package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// Where services have their addresses. The first is that of the API itself.
	serviceRange   = "10.96.0.0/16"
	serviceAddress = "10.96.0.1"
	anyPort        = "127.0.0.1:0"
	askTime        = 5 * time.Second
)

// ports of the control plane, all on loopback but the API's in a cluster with nodes.
type ports struct {
	etcd, etcdPeer, api, controllerManager, scheduler int
}

// freePorts returns ports that nobody used a moment ago: clusters without nodes share the machine's loopback.
func freePorts() (ports, error) {
	var chosen ports
	var listeners []net.Listener
	defer func() {
		for _, listener := range listeners {
			_ = listener.Close()
		}
	}()
	for _, port := range []*int{&chosen.etcd, &chosen.etcdPeer, &chosen.api, &chosen.controllerManager, &chosen.scheduler} {
		listener, err := net.Listen("tcp", anyPort)
		if err != nil {
			return ports{}, err
		}
		listeners = append(listeners, listener)
		*port = listener.Addr().(*net.TCPAddr).Port
	}
	return chosen, nil
}

// controlPlane writes keys and kubeconfigs, and returns the services in the order in which they are to be started.
func controlPlane(o *options, program string) ([]*service, *authority, error) {
	chosen, err := freePorts()
	if err != nil {
		return nil, nil, err
	}
	bind, advertise := "127.0.0.1", "127.0.0.1"
	if o.Nodes > 0 {
		chosen.api, bind, advertise = 443, "0.0.0.0", gatewayAddress
	}
	server := "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(chosen.api))
	if o.Nodes > 0 {
		server = "https://" + net.JoinHostPort(serviceAddress, strconv.Itoa(chosen.api))
	}
	keys, err := newAuthority(filepath.Join(o.Dir, "pki"))
	if err != nil {
		return nil, nil, err
	}
	for file, who := range map[string]identity{
		"apiserver": {name: "kube-apiserver", addresses: []string{"127.0.0.1", "localhost", serviceAddress, gatewayAddress,
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}},
		"apiserver-kubelet": {name: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
	} {
		if err := keys.issue(file, who); err != nil {
			return nil, nil, err
		}
	}
	for file, who := range map[string]identity{
		"admin":              {name: "admin", groups: []string{"system:masters"}},
		"controller-manager": {name: "system:kube-controller-manager"},
		"scheduler":          {name: "system:kube-scheduler"},
	} {
		if err := keys.kubeconfig(filepath.Join(o.Dir, file+".kubeconfig"), server, who); err != nil {
			return nil, nil, err
		}
	}
	client, err := keys.clientTLS()
	if err != nil {
		return nil, nil, err
	}

	etcd := fmt.Sprintf("http://127.0.0.1:%d", chosen.etcd)
	apiserver := []string{
		"--etcd-servers=" + etcd,
		"--bind-address=" + bind,
		"--secure-port=" + strconv.Itoa(chosen.api),
		"--advertise-address=" + advertise,
		"--service-cluster-ip-range=" + serviceRange,
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--client-ca-file=" + keys.path("ca.crt"),
		"--tls-cert-file=" + keys.path("apiserver.crt"),
		"--tls-private-key-file=" + keys.path("apiserver.key"),
		"--kubelet-client-certificate=" + keys.path("apiserver-kubelet.crt"),
		"--kubelet-client-key=" + keys.path("apiserver-kubelet.key"),
		"--kubelet-certificate-authority=" + keys.path("ca.crt"),
		"--kubelet-preferred-address-types=InternalIP,Hostname",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + keys.path("sa.pub"),
		"--service-account-signing-key-file=" + keys.path("sa.key"),
	}
	if o.Nodes == 0 {
		// An endpoint on loopback is not a valid one.
		apiserver = append(apiserver, "--endpoint-reconciler-type=none")
	}
	if o.Audit {
		policy := filepath.Join(o.Dir, "audit-policy.yaml")
		if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
			return nil, nil, err
		}
		apiserver = append(apiserver, "--audit-policy-file="+policy, "--audit-log-path="+filepath.Join(o.Dir, "log", "audit.log"),
			// One file, in MiB: by default it is cut at 100.
			"--audit-log-maxsize=100000")
	}
	kubeconfig := func(file string) []string {
		path := filepath.Join(o.Dir, file+".kubeconfig")
		return []string{"--kubeconfig=" + path, "--authentication-kubeconfig=" + path, "--authorization-kubeconfig=" + path,
			"--bind-address=127.0.0.1", "--leader-elect=false"}
	}
	services := []*service{
		{name: "etcd", argv: []string{
			"--data-dir=" + filepath.Join(o.Dir, "etcd"),
			"--listen-client-url=" + etcd,
			fmt.Sprintf("--listen-peer-url=http://127.0.0.1:%d", chosen.etcdPeer),
		}, ready: answers(etcd+"/health", nil)},
		{name: "kube-apiserver", argv: append(apiserver, o.APIServerArgs...), ready: answers(server+"/readyz", client)},
	}
	if o.Nodes > 0 || o.ControllerManager {
		managed := "*"
		if o.Nodes == 0 {
			// It deletes what is attached to nodes that do not exist, and without nodes that is everything.
			managed = "*,-persistentvolume-attach-detach-controller"
		}
		services = append(services, &service{name: "kube-controller-manager", argv: append(append(kubeconfig("controller-manager"),
			"--controllers="+managed,
			"--secure-port="+strconv.Itoa(chosen.controllerManager),
			"--use-service-account-credentials=true",
			"--service-account-private-key-file="+keys.path("sa.key"),
			"--root-ca-file="+keys.path("ca.crt"),
			"--cluster-signing-cert-file="+keys.path("ca.crt"),
			"--cluster-signing-key-file="+keys.path("ca.key"),
		), o.ControllerManagerArgs...), ready: answers(healthz(chosen.controllerManager), anyServer())})
	}
	if o.Nodes > 0 {
		services = append(services, &service{name: "kube-scheduler", argv: append(kubeconfig("scheduler"),
			"--secure-port="+strconv.Itoa(chosen.scheduler)), ready: answers(healthz(chosen.scheduler), anyServer())})
	}
	for _, v := range services {
		v.argv = append([]string{program, v.name}, v.argv...)
		v.name = strings.TrimPrefix(v.name, "kube-")
		v.log = filepath.Join(o.Dir, "log", v.name+".log")
	}
	return services, keys, nil
}

func healthz(port int) string { return fmt.Sprintf("https://127.0.0.1:%d/healthz", port) }

// anyServer accepts the certificates that the controller manager and the scheduler sign for themselves.
func anyServer() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }

// answers makes a check that a URL answers 200.
func answers(url string, config *tls.Config) func() error {
	client := &http.Client{Timeout: askTime, Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	return func() error {
		response, err := client.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	}
}

// auditPolicy notes who asked what, without bodies: enough to count requests by client and object.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`
