package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// A cluster of a test does not live for a day; tests that move the clock by minutes must not leave the certificates' time.
const certificateLife = 48 * time.Hour

// authority signs the certificates of one cluster, and writes them as files below its directory.
type authority struct {
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// identity is whom a certificate is for. A client is known by its name and groups, a server by its addresses.
type identity struct {
	name      string
	groups    []string
	addresses []string
}

func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificate(identity{name: "union-kube"})
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage |= x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, key: key, cert: cert}
	if err := a.write("ca", der, key); err != nil {
		return nil, err
	}
	// Service account tokens are signed with a key of their own.
	tokens, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&tokens.PublicKey)
	if err != nil {
		return nil, err
	}
	if err := writePEM(a.path("sa.pub"), "PUBLIC KEY", public); err != nil {
		return nil, err
	}
	return a, writeKey(a.path("sa.key"), tokens)
}

func certificate(who identity) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: who.name, Organization: who.groups},
		NotBefore:    time.Now().Add(-certificateLife / 2),
		NotAfter:     time.Now().Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, address := range who.addresses {
		if ip := net.ParseIP(address); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, address)
		}
	}
	return template
}

// path of one of the authority's files.
func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// issue writes FILE.crt and FILE.key for an identity.
func (a *authority) issue(file string, who identity) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificate(rand.Reader, certificate(who), a.cert, &key.PublicKey, a.key)
	if err != nil {
		return err
	}
	return a.write(file, der, key)
}

func (a *authority) write(file string, der []byte, key *ecdsa.PrivateKey) error {
	if err := writePEM(a.path(file+".crt"), "CERTIFICATE", der); err != nil {
		return err
	}
	return writeKey(a.path(file+".key"), key)
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(path, "EC PRIVATE KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// kubeconfig issues a client certificate and writes the file with which its holder reaches the API server.
func (a *authority) kubeconfig(path, server string, who identity) error {
	file := filepath.Base(path)
	if err := a.issue(file, who); err != nil {
		return err
	}
	data := map[string]string{}
	for _, name := range []string{"ca.crt", file + ".crt", file + ".key"} {
		content, err := os.ReadFile(a.path(name))
		if err != nil {
			return err
		}
		data[name] = encode(content)
	}
	return os.WriteFile(path, fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: union-kube
contexts:
- name: union-kube
  context: {cluster: union-kube, user: %q}
clusters:
- name: union-kube
  cluster:
    server: %s
    certificate-authority-data: %s
users:
- name: %q
  user:
    client-certificate-data: %s
    client-key-data: %s
`, who.name, server, data["ca.crt"], who.name, data[file+".crt"], data[file+".key"]), 0o600)
}

// clientTLS is what the runner itself uses to ask servers whether they are ready.
func (a *authority) clientTLS() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(a.path("admin.kubeconfig.crt"), a.path("admin.kubeconfig.key"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots}, nil
}
