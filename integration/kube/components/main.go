// Union-kube is a Kubernetes cluster's programs in one file: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet and kubectl, as published by their projects, chosen by the name that it is called by or by its
// first argument.
//
// One file, because nearly all of their code is shared: it takes a quarter of the space and of the time to build that six
// programs would.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs are the names that this program answers to, each with what makes its command line.
var programs = map[string]func() *cobra.Command{
	"etcd":                    newEtcdCommand,
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 nil,
}

func main() {
	name := filepath.Base(os.Args[0])
	if _, known := programs[name]; !known && len(os.Args) > 1 {
		name = os.Args[1]
		// The programs read the global arguments themselves.
		os.Args = slices.Delete(os.Args, 0, 1)
	}
	command, known := programs[name]
	switch {
	case !known:
		fmt.Fprintf(os.Stderr, "usage: union-kube PROGRAM [ARGUMENT]...\nprograms: etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl\n")
		os.Exit(2)
	case name == "kubectl":
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	default:
		os.Exit(cli.Run(command()))
	}
}
