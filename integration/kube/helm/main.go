// Helm as its project publishes it. A module of its own, because it needs later versions of what Kubernetes needs too, and
// Kubernetes is to be built from what it was released with.
package main

import (
	"errors"
	"fmt"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() {
	// By the program's name otherwise, whatever that is.
	kube.ManagedFieldsManager = "helm"
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		if failure, ok := errors.AsType[helm.CommandError](err); ok {
			os.Exit(failure.ExitCode)
		}
		os.Exit(1)
	}
}
