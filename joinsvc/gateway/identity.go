package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

const (
	// reloadEvery is how soon new certificate files are used.
	reloadEvery = 2 * time.Second
	// dialTimeout bounds connecting to a replica, dialHandshake the handshake after it.
	dialTimeout   = 2 * time.Second
	dialHandshake = 3 * time.Second
)

// Identity is a certificate and key of a mounted Secret (tls.crt, tls.key), and a
// CA to verify the other side with. The files are read again when they change; what
// cannot be used, as between the two writes of a rotation, keeps the last good ones.
type Identity struct {
	dir, caFile string
	log         *slog.Logger
	current     atomic.Pointer[identity]
}

type identity struct {
	cert, key, ca []byte
	pair          tls.Certificate
	roots         *x509.CertPool
}

// OpenIdentity reads a folder, and the CA's PEM file where one is named.
func OpenIdentity(dir, caFile string, log *slog.Logger) (*Identity, error) {
	i := &Identity{dir: dir, caFile: caFile, log: log}
	return i, i.reload()
}

// reload takes the files if they changed: all or nothing.
func (i *Identity) reload() error {
	var next identity
	for _, f := range []struct {
		path string
		into *[]byte
	}{{filepath.Join(i.dir, "tls.crt"), &next.cert}, {filepath.Join(i.dir, "tls.key"), &next.key}, {i.caFile, &next.ca}} {
		if f.path == "" {
			continue
		}
		b, err := os.ReadFile(f.path)
		if err != nil {
			return fmt.Errorf("certificate: %w", err)
		}
		*f.into = b
	}
	if old := i.current.Load(); old != nil && bytes.Equal(old.cert, next.cert) && bytes.Equal(old.key, next.key) && bytes.Equal(old.ca, next.ca) {
		return nil
	}
	var err error
	if next.pair, err = tls.X509KeyPair(next.cert, next.key); err != nil {
		return fmt.Errorf("certificate of %s: %w", i.dir, err)
	}
	if i.caFile != "" {
		next.roots = x509.NewCertPool()
		if !next.roots.AppendCertsFromPEM(next.ca) {
			return fmt.Errorf("certificate: %s holds none", i.caFile)
		}
	}
	i.current.Store(&next)
	return nil
}

// Run follows the files until ctx ends.
func (i *Identity) Run(ctx context.Context) {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before := i.current.Load()
		err := i.reload()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			i.log.ErrorContext(ctx, "certificate files cannot be used; the last good ones stay", "error", err)
		case err == nil:
			said = ""
			if i.current.Load() != before {
				i.log.InfoContext(ctx, "took new certificate files", "folder", i.dir)
			}
		}
	}
}

// server is the configuration that machines meet. Key exchange is Go's default,
// which prefers the post-quantum X25519MLKEM768; tickets spare an agent that comes
// back a signature.
func (i *Identity) server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &i.current.Load().pair, nil },
	}
}

// dial connects to a replica as the gateway, with the files of this moment.
func (i *Identity) dial(ctx context.Context, network, address, serverName string) (net.Conn, error) {
	now := i.current.Load()
	if now.roots == nil {
		return nil, errors.New("no CA to verify the join service with")
	}
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	secured := tls.Client(conn, &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, RootCAs: now.roots, ServerName: serverName,
		Certificates: []tls.Certificate{now.pair},
	})
	ctx, cancel := context.WithTimeout(ctx, dialHandshake)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return secured, nil
}
