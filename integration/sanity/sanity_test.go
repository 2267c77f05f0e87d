// Package sanity runs the conformance suite of the CSI project against a running agent.
//
// The place to start is the script `run` beside this file, which makes disks, an agent and directories, and passes them
// by the environment.
package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// setting is required, so that a run that was set up wrongly fails instead of passing without a test.
func setting(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: start integration/sanity/run", name)
	}
	return value
}

func TestConformance(t *testing.T) {
	socket := setting(t, "SANITY_SOCKET")
	directory := setting(t, "SANITY_DIRECTORY")
	mib, err := strconv.ParseInt(setting(t, "SANITY_VOLUME_MIB"), 10, 64)
	if err != nil {
		t.Fatalf("SANITY_VOLUME_MIB: %v", err)
	}
	claimed(t, socket)

	config := sanity.NewTestConfig()
	config.Address = "unix://" + socket
	config.TargetPath = filepath.Join(directory, "target")
	config.StagingPath = filepath.Join(directory, "staging")
	config.TestVolumeSize = mib << 20
	config.TestVolumeAccessType = setting(t, "SANITY_ACCESS")
	config.TestNodeVolumeAttachLimit = true
	config.IdempotentCount = 10
	config.TestVolumeParametersFile = os.Getenv("SANITY_PARAMETERS")
	sanity.Test(t, config)
}

// claimed fails where the driver claims less than it must: the suite skips the tests of what is not claimed, and a
// capability that got lost would pass unseen.
func claimed(t *testing.T, socket string) {
	t.Helper()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	has := map[string]bool{}
	plugin, err := csi.NewIdentityClient(connection).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range plugin.GetCapabilities() {
		has[fmt.Sprintf("plugin %d", c.GetService().GetType())] = true
	}
	controller, err := csi.NewControllerClient(connection).ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range controller.GetCapabilities() {
		has[fmt.Sprintf("controller %d", c.GetRpc().GetType())] = true
	}
	node, err := csi.NewNodeClient(connection).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range node.GetCapabilities() {
		has[fmt.Sprintf("node %d", c.GetRpc().GetType())] = true
	}

	// By number: later versions of the specification dropped the names of VOLUME_CONDITION.
	must := map[string]string{
		"plugin 1":      "CONTROLLER_SERVICE",
		"plugin 2":      "VOLUME_ACCESSIBILITY_CONSTRAINTS",
		"controller 1":  "CREATE_DELETE_VOLUME",
		"controller 2":  "PUBLISH_UNPUBLISH_VOLUME",
		"controller 3":  "LIST_VOLUMES",
		"controller 4":  "GET_CAPACITY",
		"controller 8":  "PUBLISH_READONLY",
		"controller 10": "LIST_VOLUMES_PUBLISHED_NODES",
		"controller 11": "VOLUME_CONDITION",
		"controller 12": "GET_VOLUME",
		"controller 13": "SINGLE_NODE_MULTI_WRITER",
		"node 1":        "STAGE_UNSTAGE_VOLUME",
		"node 2":        "GET_VOLUME_STATS",
		"node 4":        "VOLUME_CONDITION",
		"node 5":        "SINGLE_NODE_MULTI_WRITER",
		"node 6":        "VOLUME_MOUNT_GROUP",
	}
	for key, name := range must {
		if !has[key] {
			t.Errorf("the driver does not claim %s (%s)", name, key)
		}
		delete(has, key)
	}
	for key := range has {
		t.Errorf("the driver claims %s, which this list does not know: extend it", key)
	}
}
