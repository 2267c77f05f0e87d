package main

import (
	"fmt"
	"net/url"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

// How long etcd may take to be ready: on a slow disk of a busy machine it is seconds.
const etcdStart = 60 * time.Second

// newEtcdCommand makes a single etcd member that keeps its data in one directory and serves one address in plain HTTP. It
// does not wait for the disk: a test's cluster has nothing to lose in a power cut.
func newEtcdCommand() *cobra.Command {
	var dir, client, peer string
	command := &cobra.Command{
		Use:           "etcd",
		Short:         "one etcd member for a test's cluster",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: false,
		RunE: func(command *cobra.Command, _ []string) error {
			config := embed.NewConfig()
			config.Dir = dir
			config.LogLevel = "warn"
			config.UnsafeNoFsync = true
			config.AutoCompactionMode = "periodic"
			config.AutoCompactionRetention = "5m"
			clients, err := url.Parse(client)
			if err != nil {
				return err
			}
			peers, err := url.Parse(peer)
			if err != nil {
				return err
			}
			config.ListenClientUrls = []url.URL{*clients}
			config.AdvertiseClientUrls = []url.URL{*clients}
			config.ListenPeerUrls = []url.URL{*peers}
			config.AdvertisePeerUrls = []url.URL{*peers}
			config.InitialCluster = config.InitialClusterFromName(config.Name)
			etcd, err := embed.StartEtcd(config)
			if err != nil {
				return err
			}
			defer etcd.Close()
			select {
			case <-etcd.Server.ReadyNotify():
			case <-time.After(etcdStart):
				return fmt.Errorf("etcd was not ready after %s", etcdStart)
			}
			select {
			case err := <-etcd.Err():
				return err
			case <-command.Context().Done():
				return nil
			}
		},
	}
	command.Flags().StringVar(&dir, "data-dir", "", "directory of the data")
	command.Flags().StringVar(&client, "listen-client-url", "", "where to serve clients")
	command.Flags().StringVar(&peer, "listen-peer-url", "", "where to serve other members, of which there are none")
	for _, flag := range []string{"data-dir", "listen-client-url", "listen-peer-url"} {
		if err := command.MarkFlagRequired(flag); err != nil {
			panic(err)
		}
	}
	return command
}
